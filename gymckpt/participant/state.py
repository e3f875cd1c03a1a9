"""What the operations of a participant share: the phase, what is active, its lease, and how it ends.

Every transition is a function without an `await` inside: on one event loop nothing comes between its parts, which makes
the loop the one lock that serialises transitions. What takes time (becoming ready, writing, installing, ending) happens
in tasks between transitions, so that a resume can interrupt it.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from gymckpt.errors import CheckpointConflict, DeadlineExceeded, StaleCheckpoint
from gymckpt.identity import EpisodeId
from gymckpt.participant.events import Events
from gymckpt.participant.lease import Lease
from gymckpt.participant.phases import Active, Commit, Fence, Restore
from gymckpt.participant.points import RESUME_AFTER_OPEN, RESUME_BEFORE_OPEN, pass_point
from gymckpt.participant.readiness import Readiness
from gymckpt.participant.role import Role, WaitsFor
from gymckpt.participant.waiting import all_done
from gymckpt.ports import Clock, Deadline, FileSystem, Offload
from gymckpt.settings import CheckpointSettings
from gymckpt.storage.base import Base
from gymckpt.wire.control import MAX_DEADLINE_S, Operation, Phase, RestoreReply

SETTLE_PATIENCE_S = 30.0
"""How long ending a checkpoint waits for a step of the role (dropping, installing, suspending, waking) before it cuts
it short, and for one that was cut short before it goes on without it."""

T = TypeVar("T")


class State:
    """One participant's state. The operations (`preparing`, `committing`, ...) act on it."""

    def __init__(
        self, role: Role, settings: CheckpointSettings, *, clock: Clock, fs: FileSystem, offload: Offload
    ) -> None:
        self.role = role
        self.settings = settings
        self.clock = clock
        self.fs = fs
        self.offload = offload
        self.marks = role.marks
        self.events = Events(role.kind, role.instance)
        self.readiness = Readiness(role)
        self.phase: Phase = "idle"
        self.active: Active | None = None
        self.fence = Fence()
        self.lease = Lease(clock, self._expire)
        self.base: Base | None = None
        """The last checkpoint committed here or restored from: what the next one may append to."""
        self.left_installing: set[asyncio.Task[Any]] = set()
        """Installs that did not end when they were given up."""
        self._tasks: set[asyncio.Task[Any]] = set()

    # What an arriving operation meets

    def enter(self, request: Operation) -> tuple[Active | None, Deadline]:
        """What is active (None: nothing) and the deadline, on our own clock.

        Raises `StaleCheckpoint` for a fenced id, `CheckpointConflict` if another id is active, `DeadlineExceeded` if
        the deadline has passed already.
        """
        if request.checkpoint_id in self.fence:
            raise StaleCheckpoint(f"checkpoint {request.checkpoint_id} was resumed here")
        if self.active is not None and self.active.checkpoint_id != request.checkpoint_id:
            raise CheckpointConflict(
                f"checkpoint {self.active.checkpoint_id} is active here, not {request.checkpoint_id}",
                hint="resume it if it is yours; two controllers must not share a participant",
            )
        return self.active, self.deadline(request)

    def deadline(self, request: Operation) -> Deadline:
        """The request's deadline as a monotonic one, at most an hour away; raises `DeadlineExceeded` if it is past."""
        remaining_s = request.deadline_ts - self.clock.time()
        if remaining_s <= 0:
            raise DeadlineExceeded(
                f"deadline_ts {request.deadline_ts:.3f} was {min(-remaining_s, 1e15):.3f} s in the past on arrival",
                hint="compare the clocks: the reply's Date header is this server's",
            )
        return Deadline.after(self.clock, min(remaining_s, MAX_DEADLINE_S))

    def check_going_on(self, active: Active) -> None:
        """Raise `StaleCheckpoint` if `active` has ended while its operation waited."""
        if active.ended.is_set():
            raise StaleCheckpoint(f"checkpoint {active.checkpoint_id} ended here before its operation did")

    def waiting_for(self) -> str:
        """What the role knows of what keeps an export or install from ending, as the end of a message; or nothing."""
        waits_for = self.role.waits_for() if isinstance(self.role, WaitsFor) else None
        return f" (it waits for {waits_for})" if waits_for else ""

    # Transitions

    def begin(self, checkpoint_id: str, deadline: Deadline) -> Active:
        """Make an id the active one, under its lease."""
        assert self.active is None
        self.active = Active(checkpoint_id)
        self.hold(deadline)
        return self.active

    def close(self, active: Active, phase: Phase) -> None:
        """Close admission."""
        self.phase = phase
        active.closed_at_s = self.clock.monotonic()
        self.role.close()

    def hold(self, deadline: Deadline) -> float:
        """Extend the lease for an operation with `deadline`; gives its expiry on the clock's `monotonic`."""
        return self.lease.extend(deadline.at_s + self.settings.lease_grace_seconds)

    def release(self, active: Active) -> None:
        """Nothing is active, the phase is idle, admission is open. The id is not fenced by this."""
        active.ended.set()
        if self.active is active:
            self.active = None
            self.phase = "idle"
            self.lease.drop()
            if active.closed_at_s is not None:
                self.role.open()

    # The end of a checkpoint or restore

    def end(self, active: Active) -> asyncio.Task[None]:
        """Fence the id at once and begin to end it; the task is done once admission is open. Safe to repeat."""
        if active.ending is None:
            self.fence.add(active.checkpoint_id)
            active.ended.set()
            self.lease.drop()
            active.ending = self.spawn(self._end(active))
        return active.ending

    async def _end(self, active: Active) -> None:
        was: Phase = self.phase
        try:
            if active.commit is not None:
                await self._stop(active.commit)
            if active.restore is not None and active.restore.task is not None:
                await self._give_up(active.restore, active.restore.task)
            await self._wake(active)
            await pass_point(self.offload, RESUME_BEFORE_OPEN)
        finally:
            self.release(active)
        closed_s = 0.0 if active.closed_at_s is None else self.clock.monotonic() - active.closed_at_s
        self.events.emit("resumed", checkpoint_id=active.checkpoint_id, phase=was, closed_s=round(closed_s, 6))
        await pass_point(self.offload, RESUME_AFTER_OPEN)

    async def _stop(self, commit: Commit) -> None:
        """Nothing of this commit appears on disk after this, and nothing of it changes the role."""
        if commit.task is not None and commit.settling:
            await all_done(Deadline.after(self.clock, SETTLE_PATIENCE_S), [commit.task])
        if commit.export is not None:
            await commit.export.stop()
        if commit.task is not None:
            await self._cancelled(commit.task, "commit")
        if commit.export is not None:
            self.spawn(commit.export.discard())

    async def _give_up(self, restore: Restore, task: asyncio.Task[RestoreReply]) -> None:
        """What it has read is dropped at once; an install is given time to end, so that it cannot race what follows.

        One that never ends keeps nothing closed: what it installs is refused, and no restore begins while it runs.
        """
        restore.abandon()
        if restore.installing:
            await all_done(Deadline.after(self.clock, SETTLE_PATIENCE_S), [task])
        if await self._cancelled(task, "restore") or not restore.installing:
            return
        for rollout_id, attempt in restore.attempts.items():
            self.marks.raise_mark(EpisodeId(rollout_id, attempt))
        self.left_installing.add(task)
        task.add_done_callback(self.left_installing.discard)

    async def _cancelled(self, task: asyncio.Task[Any], operation: str) -> bool:
        """Cancel `task` and wait for its end, but not for ever: a role's code may swallow a cancellation."""
        if not task.done():
            task.cancel()
        ended = await all_done(Deadline.after(self.clock, SETTLE_PATIENCE_S), [task])
        if not ended:
            self.events.emit("left_running", level=logging.ERROR, operation=operation)
        return ended

    async def _wake(self, active: Active) -> None:
        if not active.suspended:
            return
        limit = Deadline.after(self.clock, SETTLE_PATIENCE_S)
        if active.suspending is not None and not active.suspending.done():
            active.suspending.cancel()  # one that comes to its end after the wake would leave compute suspended
            await all_done(limit, [active.suspending])
        wake = self.spawn(self.role.wake_compute(active.suspended))
        await all_done(limit, [wake])
        if not wake.done() or wake.cancelled() or wake.exception() is not None:
            self.events.emit("wake_failed", level=logging.ERROR, episodes=len(active.suspended))

    def _expire(self) -> None:
        active = self.active
        if active is None:
            return
        self.events.emit("lease_expired", level=logging.WARNING, checkpoint_id=active.checkpoint_id, phase=self.phase)
        self.end(active)

    # Tasks

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` whether or not a caller waits for it; an error that no caller sees is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.events.emit("task_failed", level=logging.WARNING, error=f"{type(error).__name__}: {error}"[:1000])

    async def stop_tasks(self) -> None:
        """Cancel everything that runs on its own; for the end of the process."""
        self.lease.drop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def unix(self, monotonic_s: float) -> float:
        """A moment on the monotonic clock as unix seconds, for display."""
        return self.clock.time() + (monotonic_s - self.clock.monotonic())
