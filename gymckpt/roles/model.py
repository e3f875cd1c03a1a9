"""The policy model server as a participant.

Calls that carry no capture key (judges, probes) never come here: they always pass. Of a rollout's calls, a new one
waits while closed; one that was started goes on, and its response is held until resume. So nothing but a response that
is being sent ever blocks a checkpoint. A call whose response was not begun is undelivered: its row is left out of the
export, and the restored agent makes it again.
"""

import asyncio
import itertools
import secrets
from array import array
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from gymckpt import jsoncodec
from gymckpt.errors import GymckptError, StaleAttempt
from gymckpt.identity import EpisodeId, Kind
from gymckpt.participant.admission import Gate, Unit
from gymckpt.participant.marks import Marks
from gymckpt.participant.role import Installable, RoleReport
from gymckpt.ports import Clock, Offload, Reply
from gymckpt.roles.audit import AuditLog
from gymckpt.roles.ledger import Ledger
from gymckpt.roles.ledger_rows import CallFacts, Row, make_row, next_index, repeated, resolve
from gymckpt.roles.model_backends import Backends
from gymckpt.roles.model_calls import Call, Delivery, Rollout
from gymckpt.roles.model_record import Restored, read_record, record_of, staging_keys
from gymckpt.storage.records import ExportedRecord, StoredRecord
from gymckpt.wire.cuts import HEADER_CAPTURE_KEY, HEADER_MODEL_CALL, HEADER_POLICY_VERSION
from gymckpt.wire.responses import Route, conversation, request_digest

OFFLOADED_BYTES = 256 << 10
"""JSON beyond this size is digested and parsed off the event loop."""


class ModelRole:
    """`participant.role.Role` for a policy model server, whose rollout calls pass through `serve`."""

    def __init__(
        self,
        instance: str,
        *,
        marks: Marks,
        clock: Clock,
        offload: Offload,
        ledger: Ledger,
        backends: Backends,
        audit: AuditLog | None = None,
    ) -> None:
        self._instance = instance
        self._marks = marks
        self._clock = clock
        self._offload = offload
        self._ledger = ledger
        self._backends = backends
        self._audit = audit
        self._gate = Gate()
        self._calls: set[Call] = set()
        self._rollouts: dict[str, Rollout] = {}
        self._revisions = itertools.count(1)
        self._frozen_restarts: frozenset[str] | None = None
        self._exported_keys: dict[str, list[str]] = {}

    @property
    def kind(self) -> Kind:
        """Always `model`."""
        return "model"

    @property
    def instance(self) -> str:
        """The server's name."""
        return self._instance

    @property
    def marks(self) -> Marks:
        """Which attempts are refused."""
        return self._marks

    # A call of a rollout

    async def serve(
        self, episode: EpisodeId, route: Route, body: Mapping[str, Any], *, size_bytes: int = 0, restart: bool = False
    ) -> Delivery:
        """Make the call and give its response once it may be sent; `Delivery.sent` must be called afterwards.

        A failure is held back like a response. Raises `StaleAttempt` for a retired attempt, also in the middle.
        """
        call = Call(episode, route, body, secrets.token_hex(16))
        call.task = asyncio.ensure_future(self._carry_out(call, size_bytes, restart))
        self._calls.add(call)
        try:
            return await call.task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if call.retired and not (current is not None and current.cancelling()):
                raise StaleAttempt(f"episode {episode} was retired while its call was under way") from None
            raise
        finally:
            if call.stage != "sending":
                self._calls.discard(call)

    async def _carry_out(self, call: Call, size_bytes: int, restart: bool) -> Delivery:
        digest = await self._sized(size_bytes, lambda: request_digest(call.route, call.body))
        rollout, rows = await self._enter(call)
        rollout.restored = False
        rollout.restart = rollout.restart or restart
        call.facts = self._facts(call, rollout, rows, digest)
        call.stage = "running"
        self._gate.changed.notify()
        try:
            if self._audit is not None:
                await self._audit.record(call.episode, call.facts.index, kind="model")
            reply, position = await self._ask(call)
        except (GymckptError, OSError):
            await self._hold(call)
            raise
        await self._hold(call)
        return self._deliver(call, rollout, reply, position)

    async def _enter(self, call: Call) -> tuple[Rollout, Sequence[Row]]:
        """Wait until open; the rollout's state and rows, read while it stayed open."""
        episode = call.episode
        while True:
            await self._gate.wait_open()
            rollout = self._rollout(episode)
            if rollout.ready is not None:
                await self._made_ready(rollout, rollout.ready)
            rows = await self._ledger.rows(episode)
            if self._gate.is_open and self._rollouts.get(episode.rollout_id) is rollout:
                self._check(episode)
                return rollout, rows

    def _rollout(self, episode: EpisodeId) -> Rollout:
        self._check(episode)
        rollout = self._rollouts.get(episode.rollout_id)
        if rollout is None or rollout.episode.attempt < episode.attempt:
            # What a dead execution, or an attempt that this one takes the place of, has left is none of its own.
            ready = asyncio.ensure_future(self._ledger.clear(episode.rollout_id))
            rollout = Rollout(episode, next(self._revisions), ready=ready)
            self._rollouts[episode.rollout_id] = rollout
        return rollout

    async def _made_ready(self, rollout: Rollout, ready: "asyncio.Future[None]") -> None:
        try:
            await asyncio.shield(ready)
        except GymckptError:
            if self._rollouts.get(rollout.episode.rollout_id) is rollout:
                del self._rollouts[rollout.episode.rollout_id]
            raise

    def _check(self, episode: EpisodeId) -> None:
        self._marks.check(episode)
        rollout = self._rollouts.get(episode.rollout_id)
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

    async def _ask(self, call: Call) -> tuple[Reply, int | None]:
        """The backend's reply, and where its row stands if it is an answer."""
        headers = {HEADER_MODEL_CALL: call.call_id, HEADER_CAPTURE_KEY: call.episode.capture_key}
        reply, backend = await self._backends.call(
            call.route, call.body, rollout_id=call.episode.rollout_id, headers=headers
        )
        call.backend = backend.server.url
        if not 200 <= reply.status < 300:
            return reply, None
        assert call.facts is not None
        facts = call.facts
        version = reply.headers.get(HEADER_POLICY_VERSION, "")
        row = await self._sized(
            len(reply.body),
            lambda: make_row(facts, call.route, _json_object(reply), policy_version=version, chain=()),
        )
        return reply, await self._ledger.append(call.episode, row)

    async def _hold(self, call: Call) -> None:
        while not self._gate.is_open:
            call.stage = "held"
            await self._gate.wait_open()
        self._check(call.episode)

    def _deliver(self, call: Call, rollout: Rollout, reply: Reply, position: int | None) -> Delivery:
        """No `await` since the gate was seen open: from here on the response counts as delivered."""
        call.stage = "sending"
        if position is not None:
            rollout.delivered.append(position)
            rollout.revision = next(self._revisions)
        unit = Unit(self._gate, call.episode.capture_key)
        unit.count()

        def sent() -> None:
            unit.leave()
            self._calls.discard(call)

        return Delivery(reply, sent)

    async def _sized(self, size_bytes: int, work: Any) -> Any:
        return await self._offload.run(work) if size_bytes > OFFLOADED_BYTES else work()

    # What the control plane asks

    def close(self) -> None:
        """See `Role.close`."""
        self._frozen_restarts = self._restarts()
        self._gate.close()

    def open(self) -> None:
        """See `Role.open`."""
        self._frozen_restarts = None
        self._gate.open()

    def report(self) -> RoleReport:
        """See `Role.report`. Only a response that is being sent blocks."""
        self._gate.changed.looked()
        restarts = self._frozen_restarts if self._frozen_restarts is not None else self._restarts()
        stages = [call.stage for call in self._calls]
        counts = {stage: stages.count(stage) for stage in ("waiting", "running", "held", "sending")}
        return RoleReport(blockers=self._gate.names - restarts, counts=counts, restarts=restarts)

    async def changed(self) -> None:
        """See `Role.changed`."""
        await self._gate.changed.wait()

    async def export(self, scope: Collection[EpisodeId] | None) -> AsyncIterator[ExportedRecord]:
        """See `Role.export`: delivered calls only."""
        self._exported_keys = {}
        restarts = self._frozen_restarts if self._frozen_restarts is not None else self._restarts()
        wanted = scope if scope is not None else [rollout.episode for rollout in self._rollouts.values()]
        for episode in sorted(wanted):
            rollout = self._rollouts.get(episode.rollout_id)
            if rollout is None or rollout.episode != episode or episode.capture_key in restarts:
                continue
            rows = await self._ledger.rows(episode)
            delivered = [rows[position] for position in rollout.delivered]
            self._exported_keys[episode.capture_key] = staging_keys(delivered)
            yield ExportedRecord(
                episode,
                record_of(episode, delivered),
                turns=len(delivered),
                revision=rollout.revision,
                lists={"/rows": len(delivered)},
            )

    async def validate(self, records: AsyncIterator[StoredRecord]) -> Installable:
        """See `Role.validate`."""
        restored = [read_record(stored) async for stored in records]
        return Installable([record.episode for record in restored], restored)

    async def install(self, installable: Installable, attempts: Mapping[str, int]) -> None:
        """See `Role.install`: rows go under the new attempt, in the place of whatever a dead execution left."""
        restored: list[Restored] = installable.prepared
        try:
            await asyncio.gather(*(self._install(record, attempts[record.episode.rollout_id]) for record in restored))
        except BaseException:
            await self.drop_restored(())
            raise

    async def _install(self, record: Restored, attempt: int) -> None:
        episode = EpisodeId(record.episode.rollout_id, attempt)
        self._rollouts[episode.rollout_id] = Rollout(
            episode,
            next(self._revisions),
            restored=True,
            next_index=next_index(record.rows),
            delivered=array("I", range(len(record.rows))),
        )
        await self._ledger.replace(episode, record.rows)

    async def drop_restored(self, keep: Collection[EpisodeId]) -> None:
        """See `Role.drop_restored`."""
        kept = set(keep)
        for rollout in [r for r in self._rollouts.values() if r.restored and r.episode not in kept]:
            del self._rollouts[rollout.episode.rollout_id]
            await self._ledger.delete(rollout.episode)

    async def suspend_compute(self, episodes: Collection[EpisodeId]) -> None:
        """Nothing to suspend: no compute is rented here."""

    async def wake_compute(self, episodes: Collection[EpisodeId]) -> None:
        """Nothing to wake."""

    async def retire(self, episode: EpisodeId) -> None:
        """See `Role.retire`: exactly the covered calls are cancelled, then their ledger is freed and fenced."""
        tasks = []
        for call in self._calls:
            covered = call.episode.rollout_id == episode.rollout_id and call.episode.attempt <= episode.attempt
            if covered and call.task is not None and not call.task.done():
                tasks.append(call.task)
                if not call.retired:
                    call.retired = True
                    call.task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        rollout = self._rollouts.get(episode.rollout_id)
        if rollout is not None and rollout.episode.attempt <= episode.attempt:
            del self._rollouts[episode.rollout_id]
        await self._ledger.retire(episode)
        self._gate.changed.notify()

    def live(self) -> Collection[str]:
        """Calls with a capture key, and what was restored and not claimed. Rows of ended rollouts do not count."""
        calls = {call.episode.capture_key for call in self._calls if call.task is not None and not call.task.done()}
        return calls | {r.episode.capture_key for r in self._rollouts.values() if r.restored}

    def status(self) -> Mapping[str, Any]:
        """See `Role.status`."""
        return {"restored_generation_cuts": 0}

    def commit_fields(self, exported: Sequence[EpisodeId]) -> Mapping[str, Any]:
        """The staging keys of what was exported."""
        by_episode = {e.capture_key: self._exported_keys.get(e.capture_key, []) for e in exported}
        keys = [key for found in by_episode.values() for key in found]
        return {"staging_keys": keys, "staging_keys_by_episode": by_episode}

    def _restarts(self) -> frozenset[str]:
        return frozenset(r.episode.capture_key for r in self._rollouts.values() if r.restart)


def _json_object(reply: Reply) -> dict[str, Any]:
    """The answer; one that is no JSON object gets a row that says nothing of it."""
    try:
        value = jsoncodec.loads(reply.body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
