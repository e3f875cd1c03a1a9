"""The environment server's role: it owns episodes, admits them, and answers the control plane for them."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from pydantic import Field

from gymckpt.episodes.floor import Floor
from gymckpt.errors import AdmissionClosed
from gymckpt.identity import EpisodeId, Kind
from gymckpt.participant.admission import Gate, Signal
from gymckpt.participant.marks import Marks
from gymckpt.participant.role import Installable, RoleReport
from gymckpt.ports import Offload
from gymckpt.roles.agent_tools import ToolKind
from gymckpt.roles.environment_episode import EnvironmentEpisode, EpisodeTask, Timeouts
from gymckpt.roles.environment_record import Restored, export, read, task_digest
from gymckpt.roles.neighbours import Neighbourhood
from gymckpt.roles.owned import OwnedEpisodes
from gymckpt.roles.tasksets import TasksetOptions
from gymckpt.storage.records import ExportedRecord, StoredRecord
from gymckpt.wire.gym import Task


class EnvironmentOptions(TasksetOptions):
    """What a deployment says about an environment server."""

    agent: str
    """Instance name of the agent server."""
    resources_tool_transports: tuple[ToolKind, ...] = ("direct_http",)
    """How the agent is told to reach the tools."""
    request_timeout_s: float = Field(default=86_400.0, gt=0)
    """Bound on one call to another server; the time limit of the episode is usually reached first."""


class EnvironmentRole:
    """Episodes of one environment server: running ones, and restored ones that wait for their replacement's `/run`.

    Raises `UsageError` if a server that the options name is not among the neighbours.
    """

    kind: Kind = "environment"

    def __init__(
        self,
        instance: str,
        options: EnvironmentOptions,
        neighbours: Neighbourhood,
        *,
        marks: Marks,
        offload: Offload,
        checkpointing: bool,
    ) -> None:
        self.instance = instance
        self.options = options
        self.marks = marks
        self._neighbours = neighbours
        self._offload = offload
        self._checkpointing = checkpointing
        self._signal = Signal()
        self._floor = Floor(Gate(self._signal), self._signal.notify)
        for needed in sorted({options.agent, *options.resources}):
            neighbours.server(needed)
        self._timeouts = Timeouts(options.request_timeout_s, options.clean_up_timeout_s)
        self._episodes: OwnedEpisodes[EnvironmentEpisode, Restored] = OwnedEpisodes(marks, checkpointing=checkpointing)

    # The data plane.

    async def run(self, episode: EpisodeId, task: Task, resources: str | None = None) -> dict[str, Any]:
        """Run `episode` to its end and give the verifier's reply. The caller may go away; the episode goes on.
        `resources` is given where the task set does not decide it.

        Raises `AdmissionClosed` (send the same again), `StaleAttempt`, `CheckpointConflict` (already running),
        `CheckpointFailed` (another task than the restored one), `EpisodeFailed`.
        """
        self._check_open()
        resources = resources or self.options.resources_for(task.task_id.taskset)
        task_id = {"taskset": task.task_id.taskset, "task_id": task.task_id.task_id}
        task_input = task.task_input
        content = {"responses_create_params": task_input.responses_create_params, "task_data": task_input.task_data}
        digest = ""
        if self._checkpointing:
            digest = await self._offload.run(lambda: task_digest(task_id, content))
        asked = EpisodeTask(task_id, **content, digest=digest, resources=resources, agent=self.options.agent)
        return await asyncio.shield(self._start(episode, asked).driver.reply)

    def _start(self, episode: EpisodeId, task: EpisodeTask) -> EnvironmentEpisode:
        self._check_open()
        restored = self._episodes.claim(episode, task.digest)
        started = EnvironmentEpisode(
            episode,
            task,
            floor=self._floor,
            neighbours=self._neighbours,
            timeouts=self._timeouts,
            limit_s=self.options.episode_timeout_s,
            checkpointing=self._checkpointing,
            tool_transports=self.options.resources_tool_transports,
            restored=restored,
        )
        self._episodes.started(started)
        return started

    def _check_open(self) -> None:
        if not self._floor.is_open:
            raise AdmissionClosed(f"{self.instance} takes no new episodes during a checkpoint or restore")

    async def aclose(self) -> None:
        """Stop everything at once: the server ends."""
        await self._episodes.aclose()

    # The control plane: see `participant.role.Role`.

    def close(self) -> None:
        self._floor.close()

    def open(self) -> None:
        self._floor.open()

    def report(self) -> RoleReport:
        self._signal.looked()
        counts = {**self._floor.counts(), "restored": len(self._episodes.restored)}
        return RoleReport(self._floor.blockers(), counts, self._floor.restarts())

    async def changed(self) -> None:
        await self._signal.wait()

    async def export(self, scope: Collection[EpisodeId] | None) -> AsyncIterator[ExportedRecord]:
        wanted = None if scope is None else frozenset(scope)
        restarts = frozenset(self._floor.restarts())
        for one in self._episodes:
            if (wanted is None or one.episode in wanted) and str(one.episode) not in restarts:
                yield export(one.episode, one.task.digest, one.track.exported)
        for episode, restored in self._episodes.restored:
            if wanted is None or episode in wanted:
                yield export(episode, restored.task_digest, restored.point)

    async def validate(self, records: AsyncIterator[StoredRecord]) -> Installable:
        found = [(stored.episode, read(stored, self._neighbours.servers)) async for stored in records]
        return Installable([episode for episode, _ in found], found)

    async def install(self, installable: Installable, attempts: Mapping[str, int]) -> None:
        found: list[tuple[EpisodeId, Restored]] = installable.prepared
        for source, restored in found:
            episode = EpisodeId(source.rollout_id, attempts[source.rollout_id])
            self._episodes.install(episode, restored)
        self._signal.notify()

    async def drop_restored(self, keep: Collection[EpisodeId]) -> None:
        self._episodes.drop_restored(frozenset(keep))

    async def suspend_compute(self, episodes: Collection[EpisodeId]) -> None:
        return

    async def wake_compute(self, episodes: Collection[EpisodeId]) -> None:
        return

    async def retire(self, episode: EpisodeId) -> None:
        for one in self._episodes.stop(episode):
            await one.driver.gone()

    def live(self) -> Collection[str]:
        return self._episodes.live()

    def status(self) -> Mapping[str, Any]:
        return {"restored_pending": len(self._episodes.restored)}

    def commit_fields(self, exported: Sequence[EpisodeId]) -> Mapping[str, Any]:
        return {}
