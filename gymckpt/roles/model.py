"""The policy model server as a participant.

Calls that carry no capture key (judges, probes) never come here: they always pass. Of a rollout's calls, a new one
waits while closed; one that was started goes on, and its response is held until resume. So nothing but a response that
is being sent ever blocks a checkpoint. A call whose response was not begun is undelivered: its row is left out of the
export, and the restored agent makes it again, from its cut where there is one.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from gymckpt.identity import EpisodeId, Kind
from gymckpt.participant.marks import Marks
from gymckpt.participant.role import Installable, RoleReport
from gymckpt.ports import Deadline, Offload
from gymckpt.roles.ledger import Ledger
from gymckpt.roles.ledger_rows import Row, next_index
from gymckpt.roles.model_calls import Call, Delivery, Rollout
from gymckpt.roles.model_cuts import Candidate, Cut, CutTaker
from gymckpt.roles.model_record import Restored, read_record, record_of, staging_keys
from gymckpt.roles.model_serving import Serving
from gymckpt.storage.records import ExportedRecord, StoredRecord
from gymckpt.wire.responses import Route, is_constrained


class ModelRole:
    """`participant.role.Role` for a policy model server, whose rollout calls pass through `serve`."""

    def __init__(
        self,
        instance: str,
        serving: Serving,
        *,
        marks: Marks,
        offload: Offload,
        ledger: Ledger,
        cutter: CutTaker | None = None,
    ) -> None:
        self._instance = instance
        self._serving = serving
        self._marks = marks
        self._offload = offload
        self._ledger = ledger
        self._cutter = cutter
        self._cuts: dict[EpisodeId, Cut] = {}
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

    async def serve(
        self, episode: EpisodeId, route: Route, body: Mapping[str, Any], *, size_bytes: int = 0, restart: bool = False
    ) -> Delivery:
        """See `Serving.serve`."""
        return await self._serving.serve(episode, route, body, size_bytes=size_bytes, restart=restart)

    def close(self) -> None:
        """See `Role.close`."""
        self._frozen_restarts = self._restarts()
        self._serving.gate.close()

    def open(self) -> None:
        """See `Role.open`."""
        self._frozen_restarts = None
        self._serving.gate.open()

    def report(self) -> RoleReport:
        """See `Role.report`. Only a response that is being sent blocks."""
        self._serving.gate.changed.looked()
        restarts = self._frozen_restarts if self._frozen_restarts is not None else self._restarts()
        stages = [call.stage for call in self._serving.calls]
        counts = {stage: stages.count(stage) for stage in ("waiting", "running", "held", "sending")}
        counts.update(self._serving.cut_counts)
        if away := self._serving.backends_away:
            counts["backends_away"] = away
        return RoleReport(blockers=self._serving.gate.names - restarts, counts=counts, restarts=restarts)

    async def changed(self) -> None:
        """See `Role.changed`."""
        await self._serving.gate.changed.wait()

    async def before_export(self, checkpoint_id: str, scope: Collection[EpisodeId] | None, deadline: Deadline) -> None:
        """See `BeforeExport`: ask the workers for the tokens of calls under way, in half of the time left at most."""
        self._cuts = {}
        if self._cutter is None or scope is None:
            return
        if candidates := [one for call in self._serving.calls if (one := self._candidate(call, scope))]:
            self._cuts = dict(await self._cutter.take(checkpoint_id, candidates, deadline))

    def _candidate(self, call: Call, scope: Collection[EpisodeId]) -> Candidate | None:
        under_way = call.stage in ("running", "held") and call.facts is not None and call.backend is not None
        if not under_way or call.episode not in scope or is_constrained(call.body):
            return None
        assert call.facts is not None
        assert call.backend is not None
        return Candidate(call.episode, call.facts, call.backend)

    async def export(self, scope: Collection[EpisodeId] | None) -> AsyncIterator[ExportedRecord]:
        """See `Role.export`: delivered calls only."""
        self._exported_keys = {}
        restarts = self._frozen_restarts if self._frozen_restarts is not None else self._restarts()
        wanted = scope if scope is not None else [rollout.episode for rollout in self._serving.rollouts.values()]
        for episode in sorted(wanted):
            rollout = self._serving.rollouts.get(episode.rollout_id)
            if rollout is None or rollout.episode != episode or episode.capture_key in restarts:
                continue
            rows = await self._ledger.rows(episode)
            yield self._exported(rollout, [rows[position] for position in rollout.delivered])

    def _exported(self, rollout: Rollout, delivered: list[Row]) -> ExportedRecord:
        episode = rollout.episode
        # A cut that was restored stays until the call that it belongs to has its response.
        cut = self._cuts.get(episode, rollout.cut)
        if cut is not rollout.exported_cut:
            rollout.exported_cut, rollout.revision = cut, self._serving.next_revision()
        self._exported_keys[episode.capture_key] = staging_keys(delivered, cut)
        prefix = None if cut is None else cut.tokens()
        return ExportedRecord(
            episode,
            record_of(episode, delivered, cut),
            turns=len(delivered),
            revision=rollout.revision,
            lists={"/rows": len(delivered)},
            prefix=prefix,
        )

    async def validate(self, records: AsyncIterator[StoredRecord]) -> Installable:
        """See `Role.validate`."""
        restored = [await self._offload.run(partial(read_record, stored)) async for stored in records]
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
        self._serving.rollouts[episode.rollout_id] = Rollout(
            episode,
            self._serving.next_revision(),
            restored=True,
            next_index=next_index(record.rows),
            delivered=array("I", range(len(record.rows))),
            cut=record.cut,
        )
        await self._ledger.replace(episode, record.rows)

    async def drop_restored(self, keep: Collection[EpisodeId]) -> None:
        """See `Role.drop_restored`."""
        kept = set(keep)
        for rollout in [r for r in self._serving.rollouts.values() if r.restored and r.episode not in kept]:
            del self._serving.rollouts[rollout.episode.rollout_id]
            await self._ledger.delete(rollout.episode)

    async def suspend_compute(self, episodes: Collection[EpisodeId]) -> None:
        """Nothing to suspend: no compute is rented here."""

    async def wake_compute(self, episodes: Collection[EpisodeId]) -> None:
        """Nothing to wake."""

    async def retire(self, episode: EpisodeId) -> None:
        """See `Role.retire`: exactly the covered calls are cancelled, then their ledger is freed and fenced."""
        tasks = []
        for call in self._serving.calls:
            covered = call.episode.rollout_id == episode.rollout_id and call.episode.attempt <= episode.attempt
            if covered and call.task is not None and not call.task.done():
                tasks.append(call.task)
                if not call.retired:
                    call.retired = True
                    call.task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        rollout = self._serving.rollouts.get(episode.rollout_id)
        if rollout is not None and rollout.episode.attempt <= episode.attempt:
            del self._serving.rollouts[episode.rollout_id]
        await self._ledger.retire(episode)
        self._serving.gate.changed.notify()

    def live(self) -> Collection[str]:
        """Calls with a capture key, and what was restored and not claimed. Rows of ended rollouts do not count."""
        calls = {
            call.episode.capture_key for call in self._serving.calls if call.task is not None and not call.task.done()
        }
        return calls | {r.episode.capture_key for r in self._serving.rollouts.values() if r.restored}

    def status(self) -> Mapping[str, Any]:
        """See `Role.status`."""
        return {"restored_generation_cuts": sum(r.cut is not None for r in self._serving.rollouts.values())}

    def commit_fields(self, exported: Sequence[EpisodeId]) -> Mapping[str, Any]:
        """The staging keys of what was exported."""
        by_episode = {e.capture_key: self._exported_keys.get(e.capture_key, []) for e in exported}
        keys = [key for found in by_episode.values() for key in found]
        return {"staging_keys": keys, "staging_keys_by_episode": by_episode}

    def _restarts(self) -> frozenset[str]:
        return frozenset(r.episode.capture_key for r in self._serving.rollouts.values() if r.restart)
