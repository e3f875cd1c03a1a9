"""The agent server's role: sessions that others own, episodes that it owns, and the control plane's questions."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from gymckpt.episodes.boundary import Point
from gymckpt.episodes.floor import Floor
from gymckpt.errors import AdmissionClosed, InvalidCheckpointState, UsageError
from gymckpt.identity import EpisodeId, Kind
from gymckpt.participant.admission import Gate, Signal
from gymckpt.participant.marks import Marks
from gymckpt.participant.role import Installable, RoleReport
from gymckpt.ports import Offload
from gymckpt.roles.agent_flat import FlatEpisode, FlatTask
from gymckpt.roles.agent_loop import LOOP
from gymckpt.roles.agent_options import AgentOptions
from gymckpt.roles.agent_record import FlatState, RestoredFlat, RestoredSession, export, read
from gymckpt.roles.agent_session import RETURN, Bench
from gymckpt.roles.agent_sessions import AgentSessions, Connect, connect_nothing
from gymckpt.roles.environment_record import task_digest
from gymckpt.roles.neighbours import Neighbourhood
from gymckpt.roles.owned import OwnedEpisodes
from gymckpt.storage.records import ExportedRecord, Needs, StoredRecord


class AgentRole:
    """Everything one agent server holds. `sessions` serves the data plane's session routes, `run` its flat `/run`.

    Raises `UsageError` if a server that the options name is not among the neighbours.
    """

    kind: Kind = "agent"

    def __init__(
        self,
        instance: str,
        options: AgentOptions,
        neighbours: Neighbourhood,
        *,
        marks: Marks,
        offload: Offload,
        checkpointing: bool,
        connect: Connect = connect_nothing,
    ) -> None:
        self.instance = instance
        self.options = options
        self.marks = marks
        self._neighbours = neighbours
        self._offload = offload
        self._checkpointing = checkpointing
        self._signal = Signal()
        self._gate = Gate(self._signal)
        self._floor = Floor(self._gate, self._signal.notify)
        self._bench = Bench(
            neighbours,
            self._floor,
            options.model,
            options.model_timeout_s,
            options.tool_timeout_s,
            options.max_steps,
        )
        for needed in sorted({options.model, *options.resources}):
            neighbours.server(needed)
        self.sessions = AgentSessions(self._bench, self._gate, marks, connect)
        self._episodes: OwnedEpisodes[FlatEpisode, RestoredFlat] = OwnedEpisodes(marks, checkpointing=checkpointing)
        self._model_takes_part = False
        self._frozen_restarts: tuple[str, ...] | None = None

    @property
    def captures(self) -> bool:
        """Whether sessions can be captured; if not, seeds say so."""
        return self._checkpointing and self.options.capture_sessions

    async def look_around(self) -> None:
        """Ask whether the model server takes part: only then do boundaries need it. Cheap once answered."""
        self._model_takes_part = (await self._neighbours.participation(self.options.model)).participant

    # Episodes that the agent owns.

    async def run(
        self, episode: EpisodeId, row: dict[str, Any], task_id: dict[str, Any], resources: str
    ) -> dict[str, Any]:
        """Run a flat row to its end and give the verifier's reply. The caller may go away; the episode goes on.

        Raises as `EnvironmentRole.run` does.
        """
        self._check_open()
        digest = await self._offload.run(lambda: task_digest(task_id, row)) if self._checkpointing else ""
        await self.look_around()
        started = self._start(episode, FlatTask(row, task_id, digest, resources))
        return await asyncio.shield(started.driver.reply)

    def _start(self, episode: EpisodeId, task: FlatTask) -> FlatEpisode:
        self._check_open()
        restored = self._episodes.claim(episode, task.digest)
        started = FlatEpisode(
            episode,
            task,
            self._bench,
            limit_s=self.options.episode_timeout_s,
            clean_up_timeout_s=self.options.clean_up_timeout_s,
            restart=self._checkpointing and not self.captures,
            checkpointing=self._checkpointing,
            restored=restored,
        )
        self._episodes.started(started)
        return started

    def _check_open(self) -> None:
        if not self._gate.is_open:
            raise AdmissionClosed(f"{self.instance} takes no new episodes during a checkpoint or restore")

    async def aclose(self) -> None:
        """Stop everything at once: the server ends."""
        self.sessions.abandon()
        await self._episodes.aclose()

    # The control plane: see `participant.role.Role`.

    def close(self) -> None:
        if self.captures:
            self._floor.close()
        elif self._frozen_restarts is None:
            self._frozen_restarts = tuple(self.live())

    def open(self) -> None:
        self._frozen_restarts = None
        self._floor.open()

    def report(self) -> RoleReport:
        self._signal.looked()
        if not self.captures:
            frozen = self._frozen_restarts
            return RoleReport((), self._floor.counts(), frozen if frozen is not None else tuple(self.live()))
        restarts = frozenset(self._floor.restarts())
        blockers = frozenset((*self._floor.blockers(), *self._gate.names)) - restarts
        counts = {**self._floor.counts(), "seeding": self._gate.total, "restored": len(self._episodes.restored)}
        return RoleReport(sorted(blockers), counts, sorted(restarts))

    async def changed(self) -> None:
        await self._signal.wait()

    async def export(self, scope: Collection[EpisodeId] | None) -> AsyncIterator[ExportedRecord]:
        if not self.captures:
            return
        wanted = None if scope is None else frozenset(scope)
        restarts = frozenset(self._floor.restarts())
        for session in self.sessions:
            episode = session.episode
            if (wanted is None or episode in wanted) and str(episode) not in restarts:
                point, tools = session.track.exported, session.tools
                needs = self._needs(point, tools.server.instance if tools else None)
                yield export(episode, point, needs, key=session.key)
        for one in self._episodes:
            if (wanted is None or one.episode in wanted) and str(one.episode) not in restarts:
                yield self._export_owned(one.episode, one.track.exported, one.state)
        for episode, flat in self._episodes.restored:
            if wanted is None or episode in wanted:
                yield self._export_owned(episode, flat.point, flat.state)

    async def validate(self, records: AsyncIterator[StoredRecord]) -> Installable:
        found: list[tuple[EpisodeId, RestoredSession | RestoredFlat]] = []
        async for stored in records:
            restored = read(stored)
            for instance in _servers(restored):
                try:
                    self._neighbours.server(instance)
                except UsageError as error:
                    raise InvalidCheckpointState(f"agent record of {stored.episode}: {error.detail}") from None
            found.append((stored.episode, restored))
        return Installable([episode for episode, _ in found], found)

    async def install(self, installable: Installable, attempts: Mapping[str, int]) -> None:
        found: list[tuple[EpisodeId, RestoredSession | RestoredFlat]] = installable.prepared
        for source, restored in found:
            episode = EpisodeId(source.rollout_id, attempts[source.rollout_id])
            if isinstance(restored, RestoredSession):
                self.sessions.install(episode, restored)
            else:
                self._episodes.install(episode, restored)
        await self.look_around()

    async def drop_restored(self, keep: Collection[EpisodeId]) -> None:
        kept = frozenset(keep)
        self._episodes.drop_restored(kept)
        await self.sessions.drop_restored(kept)

    async def suspend_compute(self, episodes: Collection[EpisodeId]) -> None:
        return

    async def wake_compute(self, episodes: Collection[EpisodeId]) -> None:
        return

    async def retire(self, episode: EpisodeId) -> None:
        covered = self._episodes.stop(episode)
        await self.sessions.retire(episode)
        for one in covered:
            await one.driver.gone()

    def live(self) -> Collection[str]:
        return sorted({*(str(session.episode) for session in self.sessions), *self._episodes.live()})

    def status(self) -> Mapping[str, Any]:
        return {"accepting": self._gate.is_open}

    def commit_fields(self, exported: Sequence[EpisodeId]) -> Mapping[str, Any]:
        return {}

    def _export_owned(self, episode: EpisodeId, point: Point | None, state: FlatState) -> ExportedRecord:
        return export(episode, point, self._needs(point, state.resources), key=None, flat=state)

    def _needs(self, point: Point | None, resources: str | None) -> Needs | None:
        """Whom the remaining steps call. The model only if it holds delivered calls: before that it has no record."""
        if point is None:
            return None
        step = point.boundary.step
        needs: list[tuple[Kind, str]] = []
        if step == LOOP and point.turns > 0 and self._model_takes_part:
            needs.append(("model", self.options.model))
        if step != RETURN and resources is not None:
            needs.append(("resources", resources))
        return tuple(needs)


def _servers(restored: RestoredSession | RestoredFlat) -> list[str]:
    if isinstance(restored, RestoredFlat):
        return [restored.state.resources]
    return [restored.session.tools.server] if restored.session.tools else []
