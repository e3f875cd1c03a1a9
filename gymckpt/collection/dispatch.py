"""Sends planned rollouts, bounded, and sees each through to its outcome, whatever the servers answer.

An attempt is durable in the journal before its request leaves. A request that may have been received is never sent
again: the attempt is retired everywhere, and only then does the next one go out.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from gymckpt.collection.events import FROM_INPUT, Dispatched, Event, Outcome, Voided
from gymckpt.collection.flights import Flight
from gymckpt.collection.gate import Gate
from gymckpt.collection.planfile import Planned
from gymckpt.collection.recovery import Start
from gymckpt.collection.replies import Failed, NotStarted, Succeeded, Superseded, Verdict, judge, judge_error
from gymckpt.collection.rows import request_body, result_row
from gymckpt.collection.run import Run
from gymckpt.crashpoints import crash_point, declare
from gymckpt.errors import ServerError
from gymckpt.identity import EpisodeId
from gymckpt.ports import Clock, Deadline, Offload, Reply, ServerRef, Transport
from gymckpt.wire import gym

BEFORE_JOURNAL = declare("collector.dispatch.before_journal", "an attempt is chosen, nothing says so yet")
AFTER_JOURNAL = declare("collector.dispatch.after_journal", "the attempt is in the journal, its request has not left")
AFTER_SEND = declare("collector.dispatch.after_send", "the reply to /run came, nothing says so yet")

NEVER_S = 30 * 86_400.0
"""The transport's own limit; the real one stands still while servers are closed, and is kept by the dispatcher."""
CLOSED_AGAIN_S = 0.25
LARGE_REPLY_BYTES = 1 << 18
"""A larger reply is decoded off the event loop."""
SUPERSEDED_LIMIT = 20
"""So many attempts of one rollout refused as stale are not an accident: it fails."""


class Surroundings(Protocol):
    """What the dispatcher needs of the collector around it."""

    async def record(self, event: Event) -> None:
        """Return once the event is durable and applied."""
        ...

    async def commit(self, outcome: Outcome, *, large: bool) -> None:
        """`record`, then the result files, then those who watch. `large`: its row is worth a thread."""
        ...

    async def retire(self, episode: EpisodeId) -> None:
        """Return once the attempt is retired everywhere."""
        ...

    async def unreachable(self, instance: str) -> None:
        """A connection was refused: return once the server answers again (dispatch stands still meanwhile)."""
        ...

    async def rebooted(self) -> bool:
        """Before a failed reply is counted: whether a server was started again. If so, a recovery is under way."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at once, how long, how often."""

    concurrency: int
    max_attempts: int
    rollout_timeout_s: float
    by_name: Mapping[str, int]


class Dispatcher:
    """Drives rollouts through their attempts. After `halt`, `run` may be called again."""

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
        self.gate = Gate()
        self.starts: dict[str, Start] = {}
        """Next attempts that a recovery decided, by rollout id."""
        self._closed_s = 0.0
        self._closed_since_s: float | None = None
        self._run = run
        self._servers = servers
        self._transport = transport
        self._clock = clock
        self._offload = offload
        self._limits = limits
        self._around = around
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._named = {name: asyncio.Semaphore(count) for name, count in limits.by_name.items()}
        self._flights: dict[EpisodeId, Flight] = {}
        self._tasks: dict[asyncio.Task[None], Planned] = {}
        self._committing: set[asyncio.Task[None]] = set()
        self._again: deque[Planned] = deque()
        self._not_before: dict[str, float] = {}
        self._superseded: dict[str, int] = {}
        self._error: BaseException | None = None
        self._failed_hard = asyncio.Event()
        self._halted = False

    # Watching

    @property
    def closed_s(self) -> float:
        """How long servers were closed in all: rollouts' time stands still then."""
        since_s = self._closed_since_s
        return self._closed_s + (self._clock.monotonic() - since_s if since_s is not None else 0.0)

    @property
    def closed(self) -> bool:
        """Whether servers are closed right now, for a checkpoint or a recovery."""
        return self._closed_since_s is not None

    @contextmanager
    def servers_closed(self, reason: str) -> Iterator[None]:
        """Nothing is dispatched and no rollout's time passes for the duration of the block; one at a time."""
        self._closed_since_s = self._clock.monotonic()
        try:
            with self.gate.closed(reason):
                yield
        finally:
            self._closed_s = self.closed_s
            self._closed_since_s = None

    @property
    def flights(self) -> tuple[Flight, ...]:
        return tuple(self._flights.values())

    def in_flight(self) -> dict[EpisodeId, str]:
        """Attempts whose request was sent and which have no durable outcome, with the instance they went to."""
        return {flight.episode: flight.owner for flight in self._flights.values() if flight.sent}

    def restored_unsent(self) -> dict[EpisodeId, str]:
        """Restored attempts whose request was not sent, or was refused as not started."""
        waiting = {
            start.episode: self._run.owner(rollout_id)
            for rollout_id, start in self.starts.items()
            if not start.source.is_input
        }
        return waiting | {f.episode: f.owner for f in self._flights.values() if f.restored_unsent}

    async def wait_reply(self, episode: EpisodeId, deadline: Deadline) -> bool:
        """See `host.CheckpointHost.wait_reply`."""
        flight = self._flights.get(episode)
        if flight is None:
            return bool(self._run.outcome(episode.rollout_id))
        if not flight.sent:
            return False
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await flight.wait()
        except TimeoutError:
            return False

    def abandon(self, episode: EpisodeId, reason: str) -> None:
        """Give an attempt up: it is retired, and the rollout's next one goes out. No failure of the rollout."""
        if (flight := self._flights.get(episode)) is not None:
            flight.cut_short(reason)

    # Driving

    async def run(self, feed: AsyncIterator[Planned]) -> None:
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

    async def _drive(self, feed: AsyncIterator[Planned]) -> None:
        exhausted = False
        while True:
            if self._again:
                await self._admit(self._again.popleft())
            elif not exhausted:
                planned = await anext(feed, None)
                exhausted = planned is None
                if planned is not None:
                    await self._admit(planned)
            elif self._tasks:
                await asyncio.wait([*self._tasks], return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0)  # so that what the ended ones put back is seen
            else:
                return

    async def _admit(self, planned: Planned) -> None:
        try:
            await self._slots.acquire()
            try:
                await self.gate.wait_open()
            except BaseException:
                self._slots.release()
                raise
        except BaseException:
            self._again.appendleft(planned)
            raise
        task = asyncio.create_task(self._see_through(planned))
        self._tasks[task] = planned
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        planned = self._tasks.pop(task)
        self._slots.release()
        if task.cancelled():
            self._again.append(planned)
        elif (error := task.exception()) is not None and self._error is None:
            self._error = error
            self._failed_hard.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def halt(self) -> tuple[EpisodeId, ...]:
        """Cut every flight short without an outcome, but for those whose outcome is already being made durable; their
        rollouts are put back. Gives the attempts that were cut short."""
        self._halted = True
        cut = tuple(flight.episode for flight in self._flights.values() if not flight.committing)
        tasks = list(self._tasks)
        for task in tasks:
            if task not in self._committing:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)
        self._halted = False
        return cut

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep_until(self._clock.monotonic() + min(1.0, self._limits.rollout_timeout_s / 4))
            now = self._clock.monotonic()
            for flight in list(self._flights.values()):
                spent_s = now - flight.begun_s - (self.closed_s - flight.closed_s)
                if flight.sent and spent_s > self._limits.rollout_timeout_s:
                    flight.cut_short(None)

    # One rollout

    async def _see_through(self, planned: Planned) -> None:
        content = planned.content()
        limits = [self._named[name] for name in {content["agent"], content["owner"]} if name in self._named]
        for limit in limits:
            await limit.acquire()
        try:
            while await self._attempt(planned, content):
                pass
        finally:
            for limit in limits:
                limit.release()

    async def _attempt(self, planned: Planned, content: Mapping[str, Any]) -> bool:
        """One attempt, to its end; True if the rollout needs another."""
        await self.gate.wait_open()
        rollout_id = self._run.rollout_id(planned.task, planned.repeat)
        flight = self._take_off(rollout_id, planned, content)
        try:
            crash_point(BEFORE_JOURNAL)
            await self._around.record(Dispatched(flight.episode, flight.owner, flight.source))
            crash_point(AFTER_JOURNAL)
            verdict = await self._exchange(flight)
            crash_point(AFTER_SEND)
            return await self._conclude(flight, verdict)
        finally:
            del self._flights[flight.episode]
            flight.settle(replied=False)

    def _take_off(self, rollout_id: str, planned: Planned, content: Mapping[str, Any]) -> Flight:
        start = self.starts.pop(rollout_id, None)
        next_attempt = EpisodeId(rollout_id, self._run.last_attempt(rollout_id) + 1)
        flight = Flight(
            task=planned.task,
            repeat=planned.repeat,
            episode=start.episode if start else next_attempt,
            owner=content["owner"],
            source=start.source if start else FROM_INPUT,
            row=content["row"],
            begun_s=self._clock.monotonic(),
            closed_s=self.closed_s,
            cohort=content["cohort"],
        )
        self._flights[flight.episode] = flight
        return flight

    async def _exchange(self, flight: Flight) -> Verdict:
        """Send until the request was begun, and judge what came of it."""
        body = request_body(flight.row, flight.episode, flight.task, flight.repeat)
        while True:
            await self._wait_turn(flight.owner)
            flight.sent = True
            verdict = await self._send(flight, body)
            if not isinstance(verdict, NotStarted):
                return verdict
            flight.sent = False
            flight.settle(replied=False)
            if verdict.unreachable:
                await self._around.unreachable(flight.owner)
            elif verdict.closed:
                # The gate tells of our own checkpoints; a closing that is not ours, or not over yet, is waited out.
                await self._sleep(CLOSED_AGAIN_S)
            else:
                until = self._clock.monotonic() + verdict.after_s
                self._not_before[flight.owner] = max(self._not_before.get(flight.owner, 0.0), until)

    async def _wait_turn(self, owner: str) -> None:
        while True:
            await self.gate.wait_open()
            until = self._not_before.get(owner, 0.0)
            if until <= self._clock.monotonic():
                return
            await self._clock.sleep_until(until)

    async def _send(self, flight: Flight, body: Mapping[str, Any]) -> Verdict:
        deadline = Deadline.after(self._clock, NEVER_S)
        try:
            async with asyncio.timeout(None) as flight.limit:
                reply = await self._transport.call(self._servers[flight.owner], "POST", "/run", body, deadline=deadline)
        except TimeoutError:
            if flight.abandoned is not None:
                return Superseded(flight.abandoned)
            limit_s = self._limits.rollout_timeout_s
            return Failed("timeout", f"no reply from {flight.owner} within {limit_s:g} s", unknown=True)
        except ServerError as error:
            return judge_error(error)
        finally:
            flight.limit = None
        flight.large = len(reply.body) > LARGE_REPLY_BYTES
        return await self._judge(reply, flight)

    async def _judge(self, reply: Reply, flight: Flight) -> Verdict:
        now = self._clock.time()
        if flight.large:
            return await self._offload.run(lambda: judge(reply, flight.episode, now))
        return judge(reply, flight.episode, now)

    # What came of it

    async def _conclude(self, flight: Flight, verdict: Verdict) -> bool:
        match verdict:
            case Succeeded():
                await self._commit(flight, self._success(flight, verdict))
                return False
            case Failed():
                if await self._around.rebooted():
                    await self._wait_to_be_halted()
                return await self._failed(flight, verdict)
            case Superseded(reason):
                if await self._around.rebooted():
                    await self._wait_to_be_halted()
                return await self._supersede(flight, reason)
            case NotStarted():
                return True

    def _success(self, flight: Flight, verdict: Succeeded) -> Outcome:
        row = result_row(verdict.result, flight.row, flight.episode, flight.task, flight.repeat)
        opening = self._run.opening(flight.episode.rollout_id)
        return Outcome(flight.episode, "succeeded", reward=verdict.reward, opening=opening, row=row)

    async def _failed(self, flight: Flight, verdict: Failed) -> bool:
        rollout_id = flight.episode.rollout_id
        final = verdict.terminal or self._run.failures(rollout_id) + 1 >= self._limits.max_attempts
        outcome = Outcome(
            flight.episode,
            "failed",
            final=final,
            kind=verdict.kind,
            stage=verdict.stage,
            terminal=verdict.terminal,
            opening=self._run.opening(rollout_id),
            row=_failure_row(flight, verdict, final),
        )
        await self._commit(flight, outcome)
        if final:
            return False
        await self._around.retire(flight.episode)
        return True

    async def _supersede(self, flight: Flight, reason: str) -> bool:
        rollout_id = flight.episode.rollout_id
        self._superseded[rollout_id] = self._superseded.get(rollout_id, 0) + 1
        if self._superseded[rollout_id] > SUPERSEDED_LIMIT:
            return await self._failed(flight, Failed("stale_attempt", reason, terminal=True))
        await self._around.record(Voided((flight.episode,), reason))
        await self._around.retire(flight.episode)
        return True

    async def _commit(self, flight: Flight, outcome: Outcome) -> None:
        task = asyncio.current_task()
        assert task is not None
        flight.committing = True
        self._committing.add(task)
        try:
            await self._around.commit(outcome, large=flight.large)
        finally:
            self._committing.discard(task)
            flight.committing = False
        flight.settle(replied=True)
        if self._halted:
            # Committing kept this task from being cut short; nothing may follow now that it is done.
            raise asyncio.CancelledError

    async def _wait_to_be_halted(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def _sleep(self, seconds: float) -> None:
        await self._clock.sleep_until(self._clock.monotonic() + seconds)


def _failure_row(flight: Flight, verdict: Failed, final: bool) -> dict[str, Any]:
    return {
        gym.TASK_INDEX: flight.task,
        gym.ROLLOUT_INDEX: flight.repeat,
        gym.ROLLOUT_ID: flight.episode.rollout_id,
        gym.ATTEMPT_INDEX: flight.episode.attempt,
        "failure_kind": verdict.kind,
        "failure_reason": verdict.reason,
        "stage": verdict.stage,
        "terminal": verdict.terminal,
        "final": final,
    }
