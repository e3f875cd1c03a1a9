"""One rollout from its next attempt to its outcome, whatever the servers answer.

An attempt is durable in the journal before its request leaves. A request that may have been received is never sent
again: the attempt is retired everywhere, and only then does the next one go out.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gymckpt.collection.cohorts import Cohort, Cohorts
from gymckpt.collection.events import FROM_INPUT, Dispatched, Outcome, Voided
from gymckpt.collection.flights import Flight
from gymckpt.collection.gate import Gate
from gymckpt.collection.planfile import Planned
from gymckpt.collection.recovery import Start
from gymckpt.collection.replies import (
    BUSY_S,
    CONNECTION,
    MAX_REASON,
    OUTAGES,
    Failed,
    NotStarted,
    Succeeded,
    Superseded,
    Verdict,
    judge,
    judge_error,
)
from gymckpt.collection.rows import request_body, result_row
from gymckpt.collection.run import Run
from gymckpt.collection.surroundings import Surroundings
from gymckpt.crashpoints import crash_point, declare
from gymckpt.errors import ServerError
from gymckpt.identity import EpisodeId
from gymckpt.jsoncodec import NotJson
from gymckpt.ports import Clock, Deadline, Offload, Reply, ServerRef, Transport
from gymckpt.wire import gym

BEFORE_JOURNAL = declare("collector.dispatch.before_journal", "an attempt is chosen, nothing says so yet")
AFTER_JOURNAL = declare("collector.dispatch.after_journal", "the attempt is in the journal, its request has not left")
AFTER_SEND = declare("collector.dispatch.after_send", "the reply to /run came, nothing says so yet")

NEVER_S = 30 * 86_400.0
"""The transport's own limit; the real one stands still while servers are closed, and is kept by the dispatcher."""
CLOSED_AGAIN_S = 0.25
OUTAGE_PAUSE_S = 5.0
"""How long an owner gets nothing new after a rollout of its was stopped by an outage."""
LARGE_REPLY_BYTES = 1 << 18
"""A larger reply is decoded off the event loop."""
BEGINS_AGAIN = "its cohort begins again: a member failed after others were judged"
SUPERSEDED_LIMIT = 20
"""So many attempts of one rollout refused as stale are not an accident: it fails."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at once, how long, how often."""

    concurrency: int
    max_attempts: int
    rollout_timeout_s: float
    outage_patience_s: float
    """How long rollouts may be stopped by outages, with no result between them, before the run stops."""
    by_name: Mapping[str, int]


class Attempts:
    """Sees rollouts through. What is under way is in `flights`; `starts` holds what a recovery decided."""

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
        self.cohorts = Cohorts()
        self.starts: dict[str, Start] = {}
        """Next attempts that a recovery decided, by rollout id."""
        self.flights: dict[EpisodeId, Flight] = {}
        self.committing: set[asyncio.Task[None]] = set()
        """Tasks that are making an outcome durable: they are not cut short."""
        self.halted = False
        """Nothing may follow what is being committed."""
        self._closed_s = 0.0
        self._closed_since_s: float | None = None
        self._run = run
        self._servers = servers
        self._transport = transport
        self._clock = clock
        self._offload = offload
        self._limits = limits
        self._around = around
        self._not_before: dict[str, float] = {}
        self._refusing: dict[str, tuple[float, str]] = {}
        self._superseded: dict[str, int] = {}
        self._outage_since_s: float | None = None

    @property
    def closed_s(self) -> float:
        """How long servers were closed in all: rollouts' time stands still then."""
        since_s = self._closed_since_s
        return self._closed_s + (self._clock.monotonic() - since_s if since_s is not None else 0.0)

    @property
    def closed(self) -> bool:
        """Whether servers are closed right now, for a checkpoint or a recovery."""
        return self._closed_since_s is not None

    @property
    def refusing(self) -> tuple[str, ...]:
        """Servers that begin nothing just now though they are there, and how they say so."""
        now_s = self._clock.monotonic()
        return tuple(f"{owner} {how}" for owner, (until_s, how) in self._refusing.items() if until_s >= now_s)

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

    async def see_through(self, planned: Planned, replied: Callable[[], None]) -> None:
        """Raises what stops the whole run. `replied` is called once nothing but the disk is waited for."""
        content = planned.content()
        rollout_id = self._run.rollout_id(planned.task, planned.repeat)
        while not await self._closed_cohort(rollout_id) and await self._attempt(planned, content, replied):
            pass
        self.cohorts.done(rollout_id)

    async def _attempt(self, planned: Planned, content: Mapping[str, Any], replied: Callable[[], None]) -> bool:
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
            return await self._conclude(flight, verdict, replied)
        finally:
            del self.flights[flight.episode]
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
        )
        self.flights[flight.episode] = flight
        if (cohort := self.cohorts.of(rollout_id)) is not None:
            cohort.run_again(rollout_id)
            flight.round = cohort.round
        return flight

    async def _exchange(self, flight: Flight) -> Verdict:
        """Send until the request was begun, and judge what came of it."""
        body = request_body(flight.row, flight.episode, flight.task, flight.repeat)
        while True:
            await self._wait_turn(flight.owner)
            if flight.abandoned is not None:
                return Superseded(flight.abandoned)
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
                again_s = self._clock.monotonic() + CLOSED_AGAIN_S
                self._refusing[flight.owner] = again_s + CLOSED_AGAIN_S, "is closed"
                await self._clock.sleep_until(again_s)
            else:
                until = self._clock.monotonic() + verdict.after_s
                self._not_before[flight.owner] = max(self._not_before.get(flight.owner, 0.0), until)
                self._refusing[flight.owner] = until + BUSY_S, "asks to be left alone"

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

    async def _conclude(self, flight: Flight, verdict: Verdict, replied: Callable[[], None]) -> bool:
        match verdict:
            case Succeeded():
                if await self._around.replaced():
                    await self._wait_to_be_halted()
                self._outage_since_s = None
                if self.cohorts.of(flight.episode.rollout_id) is None:
                    replied()
                try:
                    return await self._succeeded(flight, self._success(flight, verdict))
                except NotJson as error:  # it can be read, and not written: nested too deeply
                    reason = f"the reply cannot be kept: {error}"
                    return await self._failed(flight, Failed("bad_reply", reason[:MAX_REASON], terminal=True))
            case Failed(kind):
                if await self._around.rebooted():
                    await self._wait_to_be_halted()
                if kind == CONNECTION and await self._around.gone(flight.owner):
                    return await self._supersede(flight, f"{flight.owner} went away under it")
                if kind in OUTAGES and not verdict.terminal:
                    return await self._interrupted(flight, verdict)
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

    async def _succeeded(self, flight: Flight, outcome: Outcome) -> bool:
        rollout_id = flight.episode.rollout_id
        cohort = self.cohorts.of(rollout_id)
        if cohort is not None:
            await self._commit(flight, replace(outcome, final=False))
            if cohort.round == flight.round:
                flight.replied = True
                cohort.reply(rollout_id)
                await cohort.settled.wait()
            if cohort.round != flight.round and not cohort.failed:
                return await self._supersede(flight, BEGINS_AGAIN)
            outcome = self._with_its_cohort(flight, outcome, cohort)
        await self._commit(flight, outcome)
        return False

    def _with_its_cohort(self, flight: Flight, outcome: Outcome, cohort: Cohort) -> Outcome:
        if not cohort.failed:
            return outcome
        verdict = Failed("cohort", "another member of its cohort failed", "verification", terminal=True)
        row = _failure_row(flight, verdict, final=True)
        return Outcome(flight.episode, "failed", kind="cohort", stage="verification", opening=outcome.opening, row=row)

    async def _closed_cohort(self, rollout_id: str) -> bool:
        """Write the outcome of a member whose cohort has closed or failed meanwhile; False if it has to run."""
        cohort = self.cohorts.of(rollout_id)
        if cohort is None or not (cohort.closing or cohort.failed):
            return False
        attempt = self._run.replied(rollout_id) if cohort.closing else max(0, self._run.last_attempt(rollout_id))
        outcome = Outcome(
            EpisodeId(rollout_id, attempt), "failed", kind="cohort", opening=self._run.opening(rollout_id)
        )
        if cohort.closing and (row := await self._around.replied_row(rollout_id)) is not None:
            outcome = replace(outcome, outcome="succeeded", kind=None, reward=float(row["reward"]), row=row)
        await self._around.commit(outcome, large=True)
        return True

    async def _failed(self, flight: Flight, verdict: Failed) -> bool:
        rollout_id = flight.episode.rollout_id
        cohort = self.cohorts.of(rollout_id)
        if cohort is not None and cohort.failed:
            verdict = Failed("cohort", "another member of its cohort failed", verdict.stage, terminal=True)
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
            if cohort is not None and not cohort.failed:
                self._fail_cohort(cohort)
            return False
        self._begin_cohort_again(flight)
        await self._around.retire(flight.episode)
        return True

    def _fail_cohort(self, cohort: Cohort) -> None:
        """A cohort counts as a whole: with one member lost, the others would wait for it for ever."""
        cohort.fail()
        self._cut_cohort_short(cohort, "another member of its cohort failed")

    def _begin_cohort_again(self, flight: Flight) -> None:
        """The member of this flight goes out anew: if its cohort has been compared already, all of them have to."""
        cohort = self.cohorts.of(flight.episode.rollout_id)
        if cohort is not None and cohort.round == flight.round and cohort.replied:
            cohort.begin_again()
            self._cut_cohort_short(cohort, BEGINS_AGAIN)

    def _cut_cohort_short(self, cohort: Cohort, reason: str) -> None:
        members = self.cohorts.members(cohort)
        for flight in list(self.flights.values()):
            if flight.episode.rollout_id in members and not flight.replied:
                flight.cut_short(reason)

    async def _interrupted(self, flight: Flight, verdict: Failed) -> bool:
        """An outage that the servers did not wait out is no failure of the rollout. One that lasts ends the run."""
        reason, limit_s = f"{verdict.kind}: {verdict.reason}"[:MAX_REASON], self._limits.outage_patience_s
        now_s = self._clock.monotonic()
        self._outage_since_s = self._outage_since_s or now_s
        if now_s - self._outage_since_s > limit_s:
            hint = "bring the server back, then resume the run"
            raise ServerError(f"nothing but outages for {limit_s:g} s: {reason}", hint=hint)
        self._not_before[flight.owner] = now_s + OUTAGE_PAUSE_S
        return await self._supersede(flight, reason, outage=True)

    async def _supersede(self, flight: Flight, reason: str, *, outage: bool = False) -> bool:
        rollout_id = flight.episode.rollout_id
        self._superseded[rollout_id] = self._superseded.get(rollout_id, 0) + (not outage)
        cohort = self.cohorts.of(rollout_id)
        if self._superseded[rollout_id] > SUPERSEDED_LIMIT or (cohort is not None and cohort.failed):
            return await self._failed(flight, Failed("stale_attempt", reason, terminal=True))
        self._begin_cohort_again(flight)
        await self._around.record(Voided((flight.episode,), reason))
        await self._around.retire(flight.episode)
        return True

    async def _commit(self, flight: Flight, outcome: Outcome) -> None:
        task = asyncio.current_task()
        assert task is not None
        flight.committing = True
        self.committing.add(task)
        try:
            await self._around.commit(outcome, large=flight.large)
        finally:
            self.committing.discard(task)
            flight.committing = False
        flight.settle(replied=True)
        if self.halted:
            # Committing kept this task from being cut short; nothing may follow now that it is done.
            raise asyncio.CancelledError

    async def _wait_to_be_halted(self) -> None:
        await asyncio.get_running_loop().create_future()


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
