"""The resources server as a participant: what it exports, installs and retires.

Three modes, stated by the server's code. `stateless`: sessions are listed without a state. `exported`: hooks give the
states. `restart_only`: nothing of it is ever in a checkpoint, its admission never closes, and its live sessions are
reported as restarts.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from gymckpt.errors import CheckpointFailed, InvalidCheckpointState
from gymckpt.identity import EpisodeId, Kind, is_safe_name
from gymckpt.jsoncodec import Json
from gymckpt.participant.marks import Marks
from gymckpt.participant.role import Installable, RoleReport
from gymckpt.ports import Clock
from gymckpt.roles.resources_hooks import (
    HookLimits,
    SessionHooks,
    SessionStateError,
    export_states,
    limited,
    restore_states,
    validate_states,
)
from gymckpt.roles.resources_requests import SessionRequests
from gymckpt.roles.resources_sessions import Session
from gymckpt.storage.records import ExportedRecord, StoredRecord
from gymckpt.wire.control import ResourcesMode, VerifyMode


class ResourcesRole:
    """`participant.role.Role` for a resources server, whose requests pass through `requests`."""

    def __init__(
        self,
        instance: str,
        hooks: SessionHooks,
        *,
        mode: ResourcesMode,
        verify: VerifyMode,
        marks: Marks,
        clock: Clock,
        limits: HookLimits | None = None,
        extensions: Sequence[str] = (),
    ) -> None:
        self._instance = instance
        self._mode: ResourcesMode = mode
        self._verify: VerifyMode = verify
        self._marks = marks
        self._hooks = hooks
        self._limits = limits or HookLimits()
        self._extensions = tuple(extensions)
        self._frozen_restarts: frozenset[str] | None = None
        self.requests = SessionRequests(
            instance, hooks, mode=mode, verify=verify, marks=marks, clock=clock, hook_s=self._limits.hook_s
        )
        self._gate = self.requests.gate
        self._sessions = self.requests.sessions

    @property
    def kind(self) -> Kind:
        """Always `resources`."""
        return "resources"

    @property
    def instance(self) -> str:
        """The server's name."""
        return self._instance

    @property
    def marks(self) -> Marks:
        """Which attempts are refused."""
        return self._marks

    def close(self) -> None:
        """See `Role.close`. A restart-only server only freezes its restarts."""
        self._frozen_restarts = self._restarts()
        if self._mode != "restart_only":
            self._gate.close()

    def open(self) -> None:
        """See `Role.open`."""
        self._frozen_restarts = None
        self._gate.open()
        self.requests.carry_out_ends()

    def report(self) -> RoleReport:
        """See `Role.report`."""
        self._gate.changed.looked()
        counts = {"in_flight": self._gate.total, "waiting": self._gate.waiting, "sessions": len(self._sessions)}
        counts["overdue_hooks"] = len(self._hooks.overdue_hooks)
        blockers = () if self._mode == "restart_only" else sorted(self._gate.names)
        restarts = self._restarts() if self._frozen_restarts is None else self._frozen_restarts
        return RoleReport(blockers, counts, sorted(restarts))

    async def changed(self) -> None:
        """See `Role.changed`."""
        await self._gate.changed.wait()

    def _restarts(self) -> frozenset[str]:
        if self._mode != "restart_only":
            return frozenset()
        return frozenset(session.name for session in self._sessions if session.episode is not None)

    async def export(self, scope: Collection[EpisodeId] | None) -> AsyncIterator[ExportedRecord]:
        """See `Role.export`; raises `CheckpointFailed` naming the sessions whose hook failed."""
        if self._mode == "restart_only":
            return
        wanted = None if scope is None else set(scope)
        sessions = [s for s in self._sessions if s.episode is not None and (wanted is None or s.episode in wanted)]
        if self._mode == "stateless":
            for session in sessions:
                yield _record(session, None)
            return
        async for session, state in export_states(self._hooks, sessions, self._limits):
            yield _record(session, state)

    def waits_for(self) -> str | None:
        """See `WaitsFor`: the session whose hook has not ended."""
        if (running := self._hooks.overdue_hooks.running) is None:
            return None
        what, session_id = running
        session = self._sessions.get(session_id)
        return f"the hook of {session}" if session is not None else what

    async def validate(self, records: AsyncIterator[StoredRecord]) -> Installable:
        """See `Role.validate`."""
        prepared: dict[str, tuple[str, Json]] = {}
        episodes: list[EpisodeId] = []
        async for stored in records:
            session_id, state = self._checked(stored)
            if session_id in prepared:
                raise InvalidCheckpointState(f"episode {stored.episode}: session {session_id} is another episode's too")
            prepared[session_id] = (stored.episode.rollout_id, state)
            episodes.append(stored.episode)
        if self._mode == "exported":
            owners = dict(zip(prepared, episodes, strict=True))
            await validate_states(self._hooks, _states(prepared), owners, self._limits)
        return Installable(episodes, prepared)

    def _checked(self, stored: StoredRecord) -> tuple[str, Json]:
        where = f"{self._instance}, episode {stored.episode}"
        session_id = stored.record.get("session_id")
        if not isinstance(session_id, str) or not is_safe_name(session_id):
            raise InvalidCheckpointState(f"{where}: its record names no session")
        if "state" not in stored.record:
            raise InvalidCheckpointState(f"{where}: its record has no state")
        state = stored.record["state"]
        if self._mode == "restart_only" or (self._mode == "stateless" and state is not None):
            raise InvalidCheckpointState(f"{where}: this server is {self._mode} and cannot restore a session's state")
        return session_id, state

    async def install(self, installable: Installable, attempts: Mapping[str, int]) -> None:
        """See `Role.install`."""
        prepared: dict[str, tuple[str, Json]] = installable.prepared
        owners = {id_: EpisodeId(rollout_id, attempts[rollout_id]) for id_, (rollout_id, _) in prepared.items()}
        if self._mode == "exported":
            await restore_states(self._hooks, _states(prepared), owners, self._limits)
        for session_id, episode in owners.items():
            session = Session(session_id, episode, restored=True)
            session.seeded.set()
            self._sessions.add(session)

    async def drop_restored(self, keep: Collection[EpisodeId]) -> None:
        """See `Role.drop_restored`."""
        kept = set(keep)
        for session in self._sessions:
            if session.restored and session.episode not in kept:
                await self._end(session, retired=False)

    async def suspend_compute(self, episodes: Collection[EpisodeId]) -> None:
        """See `Role.suspend_compute`: only for hooks that have both directions."""
        if self._hooks.can_suspend() and (session_ids := self._ids_of(episodes)):
            await self._suspend_or_wake(self._hooks.suspend_session_states, "suspending", session_ids)

    async def wake_compute(self, episodes: Collection[EpisodeId]) -> None:
        """See `Role.wake_compute`."""
        if self._hooks.can_suspend() and (session_ids := self._ids_of(episodes)):
            await self._suspend_or_wake(self._hooks.wake_session_states, "waking", session_ids)

    async def _suspend_or_wake(
        self, hook: Callable[[list[str]], Awaitable[None]], doing: str, session_ids: list[str]
    ) -> None:
        what = f"{doing} {len(session_ids)} sessions"
        # A suspend that comes to its end late must not leave a server without compute that was opened meanwhile.
        undo = partial(self._hooks.wake_session_states, session_ids)
        await limited(self._hooks, partial(hook, session_ids), what, self._limits.hook_s, undo=undo)

    def _ids_of(self, episodes: Collection[EpisodeId]) -> list[str]:
        wanted = set(episodes)
        return [session.session_id for session in self._sessions if session.episode in wanted]

    async def retire(self, episode: EpisodeId) -> None:
        """See `Role.retire`."""
        for session in [*self._sessions.of_rollout(episode.rollout_id), *self.requests.ending]:
            mine = session.episode
            if mine is not None and mine.rollout_id == episode.rollout_id and mine <= episode:
                await self._end(session, retired=True)

    async def _end(self, session: Session, *, retired: bool) -> None:
        try:
            await self.requests.end(session, retired=retired)
        except SessionStateError as error:
            raise CheckpointFailed(error.detail, hint=error.hint) from error

    def live(self) -> Collection[str]:
        """See `Role.live`. What a hook left to itself may still change is not empty either."""
        held = {session.name for session in (*self._sessions, *self.requests.ending)}
        return held | self._hooks.overdue_hooks.changing()

    def status(self) -> Mapping[str, Any]:
        """See `Role.status`."""
        return {
            "mode": self._mode,
            "verify": self._verify,
            "retired_sessions": self._sessions.retired_count,
            "extensions": self._extensions,
        }

    def commit_fields(self, exported: Sequence[EpisodeId]) -> Mapping[str, Any]:
        """See `Role.commit_fields`."""
        return {}


def _states(prepared: Mapping[str, tuple[str, Json]]) -> dict[str, Json]:
    return {session_id: state for session_id, (_, state) in prepared.items()}


def _record(session: Session, state: Json) -> ExportedRecord:
    assert session.episode is not None
    episode = session.episode
    return ExportedRecord(
        episode=episode,
        record={
            "episode_id": {"rollout_id": episode.rollout_id, "attempt": episode.attempt},
            "session_id": session.session_id,
            "state": state,
        },
        revision=session.revision,
    )
