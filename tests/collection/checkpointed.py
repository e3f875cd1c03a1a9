"""A run of a simulated deployment whose checkpoints a test takes by itself."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from gymckpt import coordination, crashpoints
from gymckpt.collection import events
from gymckpt.collection.checkpointing import (
    Checkpointer,
    CheckpointNotTaken,
    CheckpointSettings,
    CheckpointTaken,
)
from gymckpt.identity import EpisodeId
from gymckpt.storage.checkpoints import CheckpointDirectory, Collection, PublishedCheckpoint
from tests.collection.hosts import MemoryHost
from tests.simulation.clock import run_virtual
from tests.simulation.counters import TOKEN, Counters

R1, R2, R3 = EpisodeId("r1"), EpisodeId("r2"), EpisodeId("r3")


@dataclass
class Run:
    servers: Counters
    host: MemoryHost
    directory: CheckpointDirectory
    checkpointer: Checkpointer

    @classmethod
    async def begin(cls, path: Path, *, grace_s: float = 60.0, slow_publish_s: float = 0.0) -> "Run":
        servers = Counters(path, grace_s=grace_s).start()
        host = MemoryHost()
        root = path / "checkpoints"
        directory = _SlowDirectory(servers, root, slow_publish_s)
        deployment = await coordination.discover(servers.servers, servers.network, TOKEN, servers.deadline())
        checkpointer = Checkpointer(
            deployment,
            servers.network,
            TOKEN,
            directory,
            host,
            CheckpointSettings(commit_timeout_s=40.0, control_timeout_s=20.0),
            servers.clock,
            fs=servers.fs,
            offload=servers.offload,
        )
        return cls(servers, host, directory, checkpointer)

    async def dispatch(self, *episodes: EpisodeId, owner: str = "env") -> None:
        for episode in episodes:
            await self.host.record(events.Dispatched(episode, owner))
            self.host.flying[episode] = owner
            if owner == "env":
                await self.servers.run_episode(episode)

    async def taken(self, **how: Any) -> CheckpointTaken:
        result = await self.checkpointer.take(**how)
        assert isinstance(result, CheckpointTaken), result
        self.check_open()
        return result

    async def not_taken(self, **how: Any) -> CheckpointNotTaken:
        result = await self.checkpointer.take(**how)
        assert isinstance(result, CheckpointNotTaken), result
        self.check_open()
        return result

    def check_open(self) -> None:
        assert self.servers.closed() == []
        assert {p.phase for p in self.servers.participants.values()} == {"idle"}

    async def newest(self) -> PublishedCheckpoint:
        checkpoint, problems = await self.directory.newest_valid(self.host.run_id)
        assert problems == []
        assert checkpoint is not None
        return checkpoint

    def unpublished(self) -> list[str]:
        root = Path(self.servers.directory) / "checkpoints"
        if not root.exists():
            return []
        return sorted(path.name for path in root.iterdir() if not (path / "CHECKPOINT.json").exists())


class _SlowDirectory(CheckpointDirectory):
    """Publishing takes its time, as on a busy disk."""

    def __init__(self, servers: Counters, root: PurePath, slow_s: float) -> None:
        super().__init__(servers.fs, servers.offload, root)
        self._slow_s = slow_s

    async def publish(self, checkpoint_id: str, collection: Collection, *, expected: Any = None) -> PublishedCheckpoint:
        await asyncio.sleep(self._slow_s)
        return await super().publish(checkpoint_id, collection, expected=expected)


def play(path: Path, story: Callable[[Run], Awaitable[None]], **how: Any) -> None:
    async def main() -> None:
        run = await Run.begin(path, **how)
        await run.dispatch(R1, R2)
        try:
            await story(run)
        finally:
            await run.servers.stop()

    try:
        run_virtual(main())
    finally:
        crashpoints.arm(None)


def restarted(checkpoint: PublishedCheckpoint) -> dict[EpisodeId, str]:
    return {restart.episode: restart.reason for restart in checkpoint.collection.restarted}
