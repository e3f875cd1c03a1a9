"""Calls of rollouts through a policy model server: admission, the backend, the ledger, and holding back.

A new call waits while the gate is closed; one that was started goes on, and its response is held until the gate is
open. From the moment in which it may be sent, a response counts as delivered.
"""

import asyncio
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from gymckpt import jsoncodec
from gymckpt.errors import GymckptError, StaleAttempt
from gymckpt.identity import EpisodeId
from gymckpt.participant.admission import Gate, Unit
from gymckpt.participant.marks import Marks
from gymckpt.ports import Clock, Offload, Reply
from gymckpt.roles.audit import AuditLog
from gymckpt.roles.ledger import Ledger
from gymckpt.roles.ledger_rows import CallFacts, Row, make_row, repeated, resolve
from gymckpt.roles.model_backends import Backend, Backends
from gymckpt.roles.model_calls import Call, Delivery, Rollout
from gymckpt.roles.model_cuts import Cut
from gymckpt.wire.client import excerpt
from gymckpt.wire.cuts import (
    HEADER_CAPTURE_KEY,
    HEADER_CONTINUED,
    HEADER_MODEL_CALL,
    HEADER_POLICY_VERSION,
    PREFIX_FIELD,
)
from gymckpt.wire.responses import Route, conversation, request_digest

OFFLOADED_BYTES = 256 << 10
"""JSON beyond this size is digested and parsed off the event loop."""

T = TypeVar("T")

logger = logging.getLogger("gymckpt.model")


class Serving:
    """The calls and rollouts of one server. The role reads `gate`, `calls` and `rollouts`, and installs into them."""

    def __init__(
        self,
        *,
        marks: Marks,
        clock: Clock,
        offload: Offload,
        ledger: Ledger,
        backends: Backends,
        audit: AuditLog | None = None,
    ) -> None:
        self._marks = marks
        self._clock = clock
        self._offload = offload
        self._ledger = ledger
        self._backends = backends
        self._audit = audit
        self._revisions = itertools.count(1)
        self.gate = Gate()
        self.calls: set[Call] = set()
        self.rollouts: dict[str, Rollout] = {}
        self.cut_counts: Counter[str] = Counter()

    @property
    def backends_away(self) -> int:
        """How many backends did not answer when they were asked last."""
        return self._backends.away

    def next_revision(self) -> int:
        """A number that no record of this process had before."""
        return next(self._revisions)

    async def serve(
        self, episode: EpisodeId, route: Route, body: Mapping[str, Any], *, size_bytes: int = 0, restart: bool = False
    ) -> Delivery:
        """Make the call and give its response once it may be sent; `Delivery.sent` must be called afterwards.

        A failure is held back like a response. Raises `StaleAttempt` for a retired attempt, also in the middle.
        """
        call = Call(episode, route, body, secrets.token_hex(16))
        call.task = asyncio.ensure_future(self._carry_out(call, size_bytes, restart))
        self.calls.add(call)
        try:
            return await call.task
        except asyncio.CancelledError:
            if call.stage == "sending" and call.task.done() and not call.task.cancelled():
                call.task.result().sent()  # the caller went away between the answer and its taking
            current = asyncio.current_task()
            if call.retired and not (current is not None and current.cancelling()):
                raise StaleAttempt(f"episode {episode} was retired while its call was under way") from None
            raise
        finally:
            if call.stage != "sending":
                self.calls.discard(call)

    async def _carry_out(self, call: Call, size_bytes: int, restart: bool) -> Delivery:
        digest = await self._sized(size_bytes, lambda: request_digest(call.route, call.body))
        rollout, rows = await self._enter(call)
        rollout.restored = False
        rollout.restart = rollout.restart or restart
        call.facts = self._facts(call, rollout, rows, digest)
        call.stage = "running"
        self.gate.changed.notify()
        try:
            if self._audit is not None:
                await self._audit.record(call.episode, call.facts.index, kind="model")
            reply, position = await self._ask(call, call.facts, rollout)
        except (GymckptError, OSError):
            await self._hold(call)
            raise
        await self._hold(call)
        return self._deliver(call, rollout, reply, position)

    async def _enter(self, call: Call) -> tuple[Rollout, Sequence[Row]]:
        """Wait until open; the rollout's state and rows, read while it stayed open."""
        episode = call.episode
        while True:
            await self.gate.wait_open()
            rollout = self._rollout(episode)
            if rollout.ready is not None:
                await self._made_ready(rollout, rollout.ready)
            rows = await self._ledger.rows(episode)
            if self.gate.is_open and self.rollouts.get(episode.rollout_id) is rollout:
                self._check(episode)
                return rollout, rows

    def _rollout(self, episode: EpisodeId) -> Rollout:
        self._check(episode)
        rollout = self.rollouts.get(episode.rollout_id)
        if rollout is None or rollout.episode.attempt < episode.attempt:
            # What a dead execution, or an attempt that this one takes the place of, has left is none of its own.
            ready = asyncio.ensure_future(self._ledger.clear(episode.rollout_id))
            rollout = Rollout(episode, self.next_revision(), ready=ready)
            self.rollouts[episode.rollout_id] = rollout
        return rollout

    async def _made_ready(self, rollout: Rollout, ready: "asyncio.Future[None]") -> None:
        try:
            await asyncio.shield(ready)
        except GymckptError:
            if self.rollouts.get(rollout.episode.rollout_id) is rollout:
                del self.rollouts[rollout.episode.rollout_id]
            raise

    def _check(self, episode: EpisodeId) -> None:
        self._marks.check(episode)
        rollout = self.rollouts.get(episode.rollout_id)
        if rollout is not None and episode.attempt < rollout.episode.attempt:
            raise StaleAttempt(f"episode {episode} gave way to {rollout.episode}")

    def _facts(self, call: Call, rollout: Rollout, rows: Sequence[Row], digest: str) -> CallFacts:
        key = call.episode.capture_key
        again = repeated(rows, key, digest)
        if again is None:
            index, rollout.next_index = rollout.next_index, rollout.next_index + 1
        else:
            index = again["index"]
        return CallFacts(
            call_id=call.call_id,
            index=index,
            capture_key=key,
            lineage=resolve(rows, conversation(call.route, call.body), call.body.get("previous_response_id")),
            request_digest=digest,
            admitted_at=self._clock.time(),
            repeats=None if again is None else again["call_id"],
        )

    async def _ask(self, call: Call, facts: CallFacts, rollout: Rollout) -> tuple[Reply, int | None]:
        """The backend's reply, and where its row stands if it is an answer."""
        cut = rollout.cut if rollout.cut is not None and rollout.cut.request_digest == facts.request_digest else None
        reply = await self._send(call, cut)
        if cut is not None and 400 <= reply.status < 500 and reply.status not in (408, 429):
            # Nothing was generated: whatever is wrong with the prefix, the whole answer can be had.
            self.cut_counts["cuts_refused"] += 1
            logger.warning("the prefix of call %s was refused: %s", facts.call_id, excerpt(reply))
            cut, reply = None, await self._send(call, None)
        if not 200 <= reply.status < 300:
            return reply, None
        chain: tuple[str, ...] = ()
        if cut is not None and reply.headers.get(HEADER_CONTINUED, "0") != "0":
            self.cut_counts["cuts_used"] += 1
            chain = (*cut.claim.lineage, *cut.claim.staging_keys)
        version = reply.headers.get(HEADER_POLICY_VERSION, "")
        row = await self._sized(
            len(reply.body),
            lambda: make_row(facts, call.route, _json_object(reply), policy_version=version, chain=chain),
        )
        return reply, await self._ledger.append(call.episode, row)

    async def _send(self, call: Call, cut: Cut | None) -> Reply:
        headers = {HEADER_MODEL_CALL: call.call_id, HEADER_CAPTURE_KEY: call.episode.capture_key}
        body = call.body if cut is None else {**call.body, PREFIX_FIELD: cut.claim.model_dump()}

        def took(backend: Backend) -> None:
            call.backend = backend

        return await self._backends.call(
            call.route, body, rollout_id=call.episode.rollout_id, headers=headers, took=took
        )

    async def _hold(self, call: Call) -> None:
        while not self.gate.is_open:
            call.stage = "held"
            await self.gate.wait_open()
        self._check(call.episode)

    def _deliver(self, call: Call, rollout: Rollout, reply: Reply, position: int | None) -> Delivery:
        """No `await` since the gate was seen open: from here on the response counts as delivered."""
        call.stage = "sending"
        if position is not None:
            rollout.delivered.append(position)
            rollout.revision = self.next_revision()
            if rollout.cut is not None and call.facts is not None and call.facts.index >= rollout.cut.call_index:
                rollout.cut = None
        unit = Unit(self.gate, call.episode.capture_key)
        unit.count()

        def sent() -> None:
            unit.leave()
            self.calls.discard(call)

        return Delivery(reply, sent)

    async def _sized(self, size_bytes: int, work: Callable[[], T]) -> T:
        return await self._offload.run(work) if size_bytes > OFFLOADED_BYTES else work()


def _json_object(reply: Reply) -> dict[str, Any]:
    """The answer; one that is no JSON object gets a row that says nothing of it."""
    try:
        value = jsoncodec.loads(reply.body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
