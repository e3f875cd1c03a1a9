"""Carries a recovery plan out: each step through `coordination`, each result durable, and the way back when a
checkpoint cannot be restored: the one before it, or the input.

Killed anywhere in it, the next recovery plans again from the journals and repeats what it must.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr

from gymckpt import coordination
from gymckpt.collection import events
from gymckpt.collection.host import RecoveryHost
from gymckpt.collection.recovery import (
    Candidate,
    Fence,
    Forget,
    Intend,
    Open,
    RecoveryPlan,
    Restore,
    Retire,
    Start,
    Step,
    plan_recovery,
)
from gymckpt.collection.visibility import check_visible
from gymckpt.coordination import NO_PATH_MAP, Answers, Deployment, PathMap
from gymckpt.crashpoints import crash_point, declare
from gymckpt.errors import (
    CheckpointConflict,
    ControlError,
    GymckptError,
    InvalidCheckpointState,
    ServerError,
    Unauthorized,
)
from gymckpt.identity import new_checkpoint_id
from gymckpt.ports import Clock, Deadline, FileSystem, Offload, Transport
from gymckpt.wire.control import ResumeReply

logger = logging.getLogger(__name__)

RESTORE_INTENDED = declare("collector.restore.intended", "the restore's intent is durable, no server knows of it")
RESTORE_RETIRED = declare("collector.restore.retired", "every unfinished attempt is retired everywhere")
RESTORE_SENT = declare("collector.restore.sent", "just before the restore goes out to all participants")
RESTORE_DONE = declare("collector.restore.done", "every participant has installed the checkpoint, all are closed")
RESTORE_RESUMED = declare("collector.restore.resumed", "all are open again, the journal does not say so yet")


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """Time limits, and what the user allowed."""

    restore_timeout_s: float = 600.0
    """For retiring everything, and for installing the checkpoint."""
    control_timeout_s: float = 30.0
    start_over: bool = False
    """Restore nothing: unfinished rollouts start from the input."""
    path_map: PathMap = NO_PATH_MAP


@dataclass(frozen=True, slots=True)
class Recovered:
    """The servers are clean and open; what is left is to dispatch."""

    deployment: Deployment
    """With the boot ids that the recovery saw."""
    starts: dict[str, Start]
    """The next attempt of every unfinished rollout that was ever dispatched, by rollout id."""
    checkpoint_id: str | None = None
    """The checkpoint that was restored, if one was."""
    notes: tuple[str, ...] = ()


class _NotRestorable(Exception):
    """The records are missing or damaged: another checkpoint may do."""


async def recover(
    deployment: Deployment,
    transport: Transport,
    token: SecretStr | None,
    host: RecoveryHost,
    candidates: Sequence[Candidate],
    settings: RecoverySettings,
    clock: Clock,
    *,
    fs: FileSystem,
    offload: Offload,
    on_step: Callable[[int, Step], None] = lambda number, step: None,
) -> Recovered:
    """Bring the servers to where the run can go on. Dispatch must have stopped; `candidates` are newest first.

    Raises `ServerError` for a participant that cannot be reached, cannot see the checkpoints, is held by a foreign one,
    or refuses to be restored (because it has served before: restart it, or start over); `NotAsAsked` once the lock is
    lost.
    """
    remaining = list(candidates)
    notes: list[str] = []
    while True:
        limit = Deadline.after(clock, settings.control_timeout_s)
        statuses = (await coordination.statuses(deployment, transport, token, limit)).require()
        deployment = deployment.updated(statuses)
        plan = plan_recovery(host.history(), deployment, statuses, remaining, start_over=settings.start_over)
        notes += plan.notes
        await host.check_epoch()
        if plan.checkpoint_id is not None:
            # Else a server that merely cannot see the files would call every checkpoint damaged.
            await check_visible(
                deployment,
                transport,
                token,
                remaining[0].directory.parent,
                Deadline.after(clock, settings.control_timeout_s),
                fs=fs,
                offload=offload,
                path_map=settings.path_map,
            )
        try:
            await _Procedure(deployment, transport, token, host, clock, settings).carry_out(plan, on_step)
        except _NotRestorable as error:
            remaining = remaining[1:]
            then = f"going back to {remaining[0].checkpoint_id}" if remaining else "starting over from the input"
            notes.append(f"{plan.checkpoint_id} could not be restored: {error}; {then}")
            logger.warning("%s", notes[-1])
            continue
        return Recovered(deployment, dict(plan.starts), plan.checkpoint_id, tuple(notes))


class _Procedure:
    """One plan being carried out, under an id of its own."""

    def __init__(
        self,
        deployment: Deployment,
        transport: Transport,
        token: SecretStr | None,
        host: RecoveryHost,
        clock: Clock,
        settings: RecoverySettings,
    ) -> None:
        self._deployment = deployment
        self._transport = transport
        self._token = token
        self._host = host
        self._clock = clock
        self._settings = settings
        # A recovery without a restore closes no server, so its id needs no place in the journal.
        self._id = new_checkpoint_id(0)

    async def carry_out(self, plan: RecoveryPlan, on_step: Callable[[int, Step], None]) -> None:
        for number, step in plan.numbered():
            on_step(number, step)
            await self._host.check_epoch()
            match step:
                case Fence():
                    await self._fence(step)
                case Intend():
                    await self._intend(step)
                case Retire():
                    await self._retire(step)
                case Forget():
                    await self._forget(step)
                case Restore():
                    await self._restore(step)
                case Open():
                    await self._open(step)

    def _control_deadline(self) -> Deadline:
        return Deadline.after(self._clock, self._settings.control_timeout_s)

    def _restore_deadline(self) -> Deadline:
        return Deadline.after(self._clock, self._settings.restore_timeout_s)

    async def _fence(self, step: Fence) -> None:
        """An id is fenced even where another one of ours is open, but that is refused: it is asked again at the end."""
        again: list[str] = []
        for checkpoint_id in step.checkpoint_ids:
            answers = await self._resume(checkpoint_id)
            if any(not isinstance(failure.error, CheckpointConflict) for failure in answers.failures):
                _require(answers, f"cannot abort {checkpoint_id}, which was left open")
            if answers.failures:
                again.append(checkpoint_id)
        for checkpoint_id in again:
            _require(await self._resume(checkpoint_id), f"cannot abort {checkpoint_id}, which was left open")

    async def _resume(self, checkpoint_id: str) -> Answers[ResumeReply]:
        return await coordination.resume(
            self._deployment, self._transport, self._token, checkpoint_id, self._control_deadline()
        )

    async def _intend(self, step: Intend) -> None:
        self._id = await self._host.begin_checkpoint(restore=True)
        await self._host.record(events.RestoreIntended(self._id, step.checkpoint_id, step.installs))
        crash_point(RESTORE_INTENDED)

    async def _retire(self, step: Retire) -> None:
        answers = await coordination.retire(
            self._deployment,
            self._transport,
            self._token,
            self._id,
            self._restore_deadline(),
            episodes=step.episodes,
        )
        _require(answers, "cannot retire what was in flight")
        await self._host.record(events.Retired(step.episodes))
        crash_point(RESTORE_RETIRED)

    async def _forget(self, step: Forget) -> None:
        answers = await coordination.forget(
            self._deployment,
            self._transport,
            self._token,
            self._id,
            self._restore_deadline(),
            rollout_ids=[episode.rollout_id for episode in step.episodes],
        )
        _require(answers, "cannot let finished rollouts be forgotten")
        await self._host.record(events.Retired(step.episodes, forgotten=True))

    async def _restore(self, step: Restore) -> None:
        crash_point(RESTORE_SENT)
        try:
            await coordination.restore(
                self._deployment.only(step.participants),
                self._transport,
                self._token,
                self._id,
                self._restore_deadline(),
                checkpoint_dir=step.directory,
                episodes=step.named,
                path_map=self._settings.path_map,
                cleanup=self._deployment,
            )
        except GymckptError as error:
            await self._host.record(events.RestoreFailed(self._id, error.detail))
            raise _why_not_restored(step, error) from error
        crash_point(RESTORE_DONE)

    async def _open(self, step: Open) -> None:
        _require(await self._resume(self._id), f"cannot open the servers after the restore of {step.checkpoint_id}")
        crash_point(RESTORE_RESUMED)
        await self._host.record(events.Restored(self._id, step.checkpoint_id))


def _why_not_restored(step: Restore, error: GymckptError) -> Exception:
    match error:
        case InvalidCheckpointState():
            return _NotRestorable(error.detail)
        case Unauthorized():
            return error
        case ControlError():
            return ServerError(
                f"{step.checkpoint_id} was not restored: {error.detail}",
                hint="start the servers named again, empty, or start over from the input (--start-over)",
            )
        case _:
            return error


def _require(answers: Answers[Any], doing: str) -> None:
    if (error := coordination.failed(answers, doing)) is not None:
        raise error
