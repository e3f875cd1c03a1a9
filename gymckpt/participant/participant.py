"""The control plane inside a server: messages of `wire.control` in, messages out.

`Participant` knows nothing of HTTP: `routes.mount` serves it, and a simulated deployment calls it directly. It must be
made and called on one event loop.
"""

import secrets
from typing import Any

from gymckpt.errors import CheckpointConflict, ControlError, DeadlineExceeded, InvalidPhase
from gymckpt.participant import committing, preparing, restoring, retiring
from gymckpt.participant.directories import checked_path, refuse_symlinks
from gymckpt.participant.marks import Marks
from gymckpt.participant.readiness import on_the_wire
from gymckpt.participant.role import Role
from gymckpt.participant.state import State
from gymckpt.participant.waiting import all_done
from gymckpt.ports import Clock, FileSystem, Offload
from gymckpt.settings import CheckpointSettings
from gymckpt.wire.control import (
    EXTENSIONS,
    CommitReply,
    CommitRequest,
    ForgetReply,
    ForgetRequest,
    Operation,
    Phase,
    PrepareReply,
    ProbeReply,
    ProbeRequest,
    RenewReply,
    RestoreReply,
    RestoreRequest,
    ResumeReply,
    RetireReply,
    RetireRequest,
    Status,
)


class Participant:
    """One server's part in checkpoints. Operations raise a `ControlError` where they refuse, and are safe to repeat."""

    def __init__(
        self,
        role: Role,
        settings: CheckpointSettings,
        *,
        clock: Clock,
        fs: FileSystem,
        offload: Offload,
        boot_id: str | None = None,
    ) -> None:
        self.role = role
        self.boot_id = boot_id or secrets.token_hex(16)
        self._settings = settings
        self._state = State(role, settings, clock=clock, fs=fs, offload=offload)
        self._retiring = retiring.Retiring(role)

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        return self._state.phase

    @property
    def marks(self) -> Marks:
        """What is refused here; shared with the role."""
        return self._state.marks

    @property
    def counters(self) -> dict[str, int]:
        """Happenings since the process started, by name."""
        return dict(self._state.events.counters)

    async def status(self) -> Status:
        """What a controller needs to know before it does anything; changes nothing."""
        state, own = self._state, dict(self.role.status())
        expires_at_s = state.lease.expires_at_s
        common: dict[str, Any] = {
            "kind": self.role.kind,
            "instance": self.role.instance,
            "phase": state.phase,
            "checkpoint_id": state.active.checkpoint_id if state.active else None,
            "lease_expires_at": state.unix(expires_at_s) if expires_at_s is not None else None,
            "retired_rollouts": state.marks.count,
            "report": on_the_wire(state.readiness.look()),
            "boot_id": self.boot_id,
            "extensions": [*EXTENSIONS, *own.get("extensions", ())],
            "counters": self.counters,
        }
        return Status(**{**own, **common})

    async def prepare(self, request: Operation) -> PrepareReply:
        """Close admission and wait until ready (`prepared`), or the deadline (`preparing`: it stays closed)."""
        with self._state.events.refusals("prepare"):
            return await preparing.prepare(self._state, request)

    async def renew(self, request: Operation) -> RenewReply:
        """Extend the lease; needs this checkpoint to be active."""
        with self._state.events.refusals("renew"):
            active, deadline = self._state.enter(request)
            if active is None:
                raise InvalidPhase(f"nothing to renew: {request.checkpoint_id} is not active here")
            return RenewReply(lease_expires_at=self._state.unix(self._state.hold(deadline)))

    async def commit(self, request: CommitRequest) -> CommitReply:
        """Export once and write; the manifest comes last."""
        with self._state.events.refusals("commit"):
            return await committing.commit(self._state, request)

    async def restore(self, request: RestoreRequest) -> RestoreReply:
        """Read, check, then install all or nothing; closed until resume."""
        with self._state.events.refusals("restore"):
            return await restoring.restore(self._state, self._retiring, request)

    async def resume(self, request: Operation) -> ResumeReply:
        """Stop what is unfinished, open admission, fence the id. From any phase; also the abort.

        `idempotent`: the id had been resumed before. Never wrong to send again: `DeadlineExceeded` says only that an
        install or a hook of the role has not ended yet, and that admission opens by itself once it has.
        """
        with self._state.events.refusals("resume"):
            return await self._resume(request)

    async def retire(self, request: RetireRequest) -> RetireReply:
        """Refuse, stop and free attempts and all earlier ones of their rollouts; only when idle or restored."""
        with self._state.events.refusals("retire"):
            return await retiring.retire(self._state, self._retiring, request)

    async def forget(self, request: ForgetRequest) -> ForgetReply:
        """Drop marks of rollouts that have nothing running any more; only when idle or restored."""
        with self._state.events.refusals("forget"):
            return await retiring.forget(self._state, self._retiring, request)

    async def probe(self, request: ProbeRequest) -> ProbeReply:
        """Whether this server sees the file that the controller wrote, and how much space is left beside it."""
        with self._state.events.refusals("probe"):
            return await self._state.offload.run(lambda: self._probe(request))

    def refused(self, operation: str, error: ControlError) -> None:
        """Count and log a refusal that was made elsewhere: by the role on its own routes, or for want of the token."""
        self._state.events.refused(operation, error)

    async def close(self) -> None:
        """Cancel what runs on its own; for the end of the process. Admission stays as it is."""
        await self._state.stop_tasks()
        await self._retiring.stop_tasks()

    async def _resume(self, request: Operation) -> ResumeReply:
        state = self._state
        deadline = state.deadline(request)
        active, fenced = state.active, request.checkpoint_id in state.fence
        if active is not None and active.checkpoint_id == request.checkpoint_id:
            ending = state.end(active)
            if not await all_done(deadline, [ending]):
                raise DeadlineExceeded(f"{request.checkpoint_id} is fenced, but what it began has not ended yet")
            ending.result()
            return ResumeReply(phase="idle", idempotent=fenced)
        state.fence.add(request.checkpoint_id)
        if active is not None and not fenced:
            raise CheckpointConflict(
                f"checkpoint {active.checkpoint_id} is active here; {request.checkpoint_id} is fenced all the same"
            )
        return ResumeReply(phase="idle", idempotent=fenced)

    def _probe(self, request: ProbeRequest) -> ProbeReply:
        path = checked_path(request.path, self._settings.root)
        refuse_symlinks(self._state.fs, path.parent, self._settings.root)
        fs = self._state.fs
        try:
            seen = fs.read(path, 0, len(request.nonce) + 2).strip() == request.nonce.encode()
            return ProbeReply(seen=seen, free_bytes=fs.free_bytes(path))
        except OSError:
            return ProbeReply(seen=False, free_bytes=0)
