"""Admits planned rollouts, bounded, in the order of the plan, and carries them until each has its outcome."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager

from gymckpt.collection.attempts import Attempts, Limits
from gymckpt.collection.feed import Batch
from gymckpt.collection.flights import Flight
from gymckpt.collection.gate import Gate
from gymckpt.collection.planfile import Planned
from gymckpt.collection.recovery import Start
from gymckpt.collection.run import Run
from gymckpt.collection.surroundings import Surroundings
from gymckpt.identity import EpisodeId
from gymckpt.ports import Clock, Deadline, Offload, ServerRef, Transport

SET_ASIDE = 256
"""So many rollouts at most are read ahead of those that wait for the limit of an agent."""


class _Seat:
    """What a rollout takes of the limits until its reply has come: the next may go out while the outcome of this one is
    made durable."""

    def __init__(self, slots: asyncio.Semaphore, running: Counter[str], names: set[str]) -> None:
        self._slots = slots
        self._running = running
        self._names = names
        self._taken = True
        if names:
            running.update(names)

    def leave(self) -> None:
        """Give it back. Once more does nothing."""
        if self._taken:
            self._taken = False
            self._slots.release()
            if self._names:
                self._running.subtract(self._names)


class Dispatcher:
    """Drives rollouts to their outcomes. `halt` cuts what is under way short; the same `run` then goes on."""

    def __init__(
        self,
        run: Run,
        servers: Mapping[str, ServerRef],
        transport: Transport,
        clock: Clock,
        offload: Offload,
        limits: Limits,
        around: Surroundings,
    ) -> None:
        self._attempts = Attempts(run, servers, transport, clock, offload, limits, around)
        self._run = run
        self._clock = clock
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._rooms = asyncio.Semaphore(2 * limits.concurrency)
        """Bounds replies that wait for the disk: so many at most as may be under way."""
        self._tasks: dict[asyncio.Task[None], tuple[Planned, _Seat]] = {}
        self._running: Counter[str] = Counter()
        self._waiting: deque[tuple[Planned, ...]] = deque()
        self._error: BaseException | None = None
        self._failed_hard = asyncio.Event()

    # Watching

    @property
    def gate(self) -> Gate:
        """Whether requests may leave, and why not."""
        return self._attempts.gate

    @property
    def paused(self) -> tuple[str, ...]:
        """Why requests may not leave, or are begun by nobody."""
        return self.gate.reasons or self._attempts.refusing

    @property
    def starts(self) -> Mapping[str, Start]:
        """Next attempts that a recovery decided and that were not taken up yet, by rollout id."""
        return self._attempts.starts

    def begin_with(self, starts: Mapping[str, Start]) -> None:
        """What a recovery decided, in place of anything decided before."""
        self._attempts.starts = dict(starts)

    @property
    def closed(self) -> bool:
        """Whether servers are closed right now, for a checkpoint or a recovery."""
        return self._attempts.closed

    def servers_closed(self, reason: str) -> AbstractContextManager[None]:
        """Nothing is dispatched and no rollout's time passes for the duration of the block; one at a time."""
        return self._attempts.servers_closed(reason)

    @property
    def flights(self) -> tuple[Flight, ...]:
        return tuple(self._attempts.flights.values())

    def in_flight(self) -> dict[EpisodeId, str]:
        """Attempts whose request was sent and which have no durable outcome, with the instance they went to."""
        return {flight.episode: flight.owner for flight in self._attempts.flights.values() if flight.under_way}

    def restored_unsent(self) -> dict[EpisodeId, str]:
        """Restored attempts whose request was not sent, or was refused as not started."""
        waiting = {
            start.episode: self._run.owner(rollout_id)
            for rollout_id, start in self._attempts.starts.items()
            if not start.source.is_input
        }
        return waiting | {f.episode: f.owner for f in self._attempts.flights.values() if f.restored_unsent}

    async def wait_reply(self, episode: EpisodeId, deadline: Deadline) -> bool:
        """See `host.CheckpointHost.wait_reply`."""
        flight = self._attempts.flights.get(episode)
        if flight is None:
            return self._run.ended(episode)
        if flight.replied or not flight.sent:
            return flight.replied
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await flight.wait()
        except TimeoutError:
            return False

    def abandon(self, episode: EpisodeId, reason: str) -> None:
        """Give an attempt up: it is retired, and the rollout's next one goes out. No failure of the rollout."""
        if (flight := self._attempts.flights.get(episode)) is not None:
            flight.cut_short(reason)

    # Driving

    async def run(self, feed: AsyncIterator[Batch]) -> None:
        """Drive everything that `feed` gives, and what a halt put back, until nothing is left.

        Raises what stops the whole run: errors of the journal and of the lock. Cancelled, it leaves its flights as they
        are: `halt` ends them.
        """
        sweeper = asyncio.create_task(self._sweep())
        driving = asyncio.create_task(self._drive(feed))
        failing = asyncio.create_task(self._failed_hard.wait())
        try:
            await asyncio.wait([driving, failing], return_when=asyncio.FIRST_COMPLETED)
            self._raise_error()
            await driving
        finally:
            for task in (sweeper, driving, failing):
                task.cancel()
            await asyncio.wait([sweeper, driving, failing])

    async def _drive(self, feed: AsyncIterator[Batch]) -> None:
        exhausted = False
        while True:
            if (members := self._admissible()) is not None:
                await self._admit(members)
            elif not exhausted and len(self._waiting) < SET_ASIDE:
                batch = await anext(feed, None)
                exhausted = batch is None
                if batch is not None:
                    self._attempts.cohorts.admit(batch, self._run)
                    self._waiting.append(batch.members)
            elif self._tasks:
                await asyncio.wait([*self._tasks], return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0)  # so that what the ended ones put back is seen
            else:
                return

    def _admissible(self) -> tuple[Planned, ...] | None:
        """The first that waits and whose limits have room. One that waits for an agent's limit holds nobody else up."""
        if not self._limits.by_name:
            return self._waiting.popleft() if self._waiting else None
        for place, members in enumerate(self._waiting):
            names = Counter(name for planned in members for name in self._limited(planned))
            full = any(
                self._running[name] and self._running[name] + count > self._limits.by_name[name]
                for name, count in names.items()
            )
            if not full:
                del self._waiting[place]
                return members
        return None

    def _limited(self, planned: Planned) -> set[str]:
        by_name = self._limits.by_name
        return {planned.name, planned.owner}.intersection(by_name) if by_name else set()

    async def _admit(self, members: tuple[Planned, ...]) -> None:
        """Begin these rollouts, all at once: a cohort that began with a part of itself might wait for the rest."""
        taken: list[asyncio.Semaphore] = []
        try:
            for limit in (self._rooms, self._slots):
                for _ in members:
                    await limit.acquire()
                    taken.append(limit)
            await self.gate.wait_open()
        except BaseException:
            for limit in taken:
                limit.release()
            self._waiting.appendleft(members)
            raise
        for planned in members:
            seat = _Seat(self._slots, self._running, self._limited(planned))
            task = asyncio.create_task(self._attempts.see_through(planned, seat.leave))
            self._tasks[task] = planned, seat
            task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        planned, seat = self._tasks.pop(task)
        seat.leave()
        self._rooms.release()
        if task.cancelled():
            # A halt lets an outcome that is being made durable become so: that rollout is finished, not cut short.
            if not self._run.finished(planned.task, planned.repeat):
                self._waiting.append((planned,))
        elif (error := task.exception()) is not None and self._error is None:
            self._error = error
            self._failed_hard.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def halt(self) -> tuple[EpisodeId, ...]:
        """Cut every flight short without an outcome, but for those whose outcome is already being made durable; their
        rollouts are put back. Gives the attempts that were cut short."""
        self._attempts.halted = True
        cut = tuple(flight.episode for flight in self._attempts.flights.values() if not flight.committing)
        tasks = list(self._tasks)
        for task in tasks:
            if task not in self._attempts.committing:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)
        self._attempts.halted = False
        return cut

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep_until(self._clock.monotonic() + min(1.0, self._limits.rollout_timeout_s / 4))
            now = self._clock.monotonic()
            for flight in list(self._attempts.flights.values()):
                spent_s = now - flight.begun_s - (self._attempts.closed_s - flight.closed_s)
                if flight.under_way and spent_s > self._limits.rollout_timeout_s:
                    flight.cut_short(None)
