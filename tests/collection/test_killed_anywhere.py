"""A collector that is killed at each single thing it does: between any two requests, replies and journal lines.

What a killed process has sent may still arrive. What comes after it is a new collector with the same journal.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gymckpt import coordination
from gymckpt.collection import events
from gymckpt.collection.candidates import find_candidates
from gymckpt.collection.checkpointing import Checkpointer, CheckpointSettings, CheckpointTaken
from gymckpt.collection.recovery_procedure import Recovered, RecoverySettings, recover
from gymckpt.identity import EpisodeId
from gymckpt.ports import Reply, ServerRef
from gymckpt.storage.checkpoints import CheckpointDirectory
from tests.collection.hosts import MemoryHost
from tests.simulation.clock import run_virtual
from tests.simulation.counters import TOKEN, Counters
from tests.simulation.transport import MemoryNetwork

R1, R2 = EpisodeId("r1"), EpisodeId("r2")


class Killed(BaseException):
    """No code of a killed process runs any more."""


@dataclass
class Life:
    """Ends after so many deeds; None never does."""

    deeds_left: int | None = None

    def deed(self) -> None:
        if self.deeds_left is None:
            return
        self.deeds_left -= 1
        if self.deeds_left < 0:
            raise Killed


@dataclass
class MortalNetwork:
    """Dies before a request is sent, or after, or when its reply came."""

    network: MemoryNetwork
    life: Life

    async def call(self, server: ServerRef, method: str, path: str, body: Any = None, **how: Any) -> Reply:
        self.life.deed()
        sent = asyncio.create_task(self.network.call(server, method, path, body, **how))
        sent.add_done_callback(lambda task: task.cancelled() or task.exception())
        self.life.deed()
        reply = await asyncio.shield(sent)
        self.life.deed()
        return reply


@dataclass
class MortalHost(MemoryHost):
    """Dies before a line is durable, or after."""

    life: Life = field(default_factory=Life)

    async def begin_checkpoint(self, restore: bool = False) -> str:
        self.life.deed()
        checkpoint_id = await super().begin_checkpoint(restore)
        self.life.deed()
        return checkpoint_id

    async def record(self, event: events.Event) -> None:
        self.life.deed()
        await super().record(event)
        self.life.deed()


class World:
    """Servers, files and the journal: all that outlives a collector."""

    def __init__(self, path: Path) -> None:
        self.servers = Counters(path).start()
        self.directory = CheckpointDirectory(self.servers.fs, self.servers.offload, path / "checkpoints")
        self.journal: list[events.Event] = []

    def host(self, life: Life, flying: Mapping[EpisodeId, str] | None = None) -> MortalHost:
        return MortalHost(journal=self.journal, flying=dict(flying or {}), life=life)

    async def collect(self, life: Life) -> bool:
        """Take a checkpoint; whether the collector lived to tell of it."""
        servers, network = self.servers, MortalNetwork(self.servers.network, life)
        try:
            deployment = await coordination.discover(servers.servers, network, TOKEN, servers.deadline())
            checkpointer = Checkpointer(
                deployment,
                network,
                TOKEN,
                self.directory,
                self.host(life, {R1: "env", R2: "env"}),
                CheckpointSettings(),
                servers.clock,
                fs=servers.fs,
                offload=servers.offload,
            )
            assert isinstance(await checkpointer.take(), CheckpointTaken)
        except Killed:
            return False
        return True

    async def recover(self, life: Life) -> Recovered | None:
        """Recover; None if the collector was killed in it."""
        servers, network, host = self.servers, MortalNetwork(self.servers.network, life), self.host(life)
        try:
            deployment = await coordination.discover(servers.servers, network, TOKEN, servers.deadline())
            found, problems = await find_candidates(self.directory, host.run_id)
            assert problems == []
            return await recover(
                deployment,
                network,
                TOKEN,
                host,
                found,
                RecoverySettings(),
                servers.clock,
                fs=servers.fs,
                offload=servers.offload,
            )
        except Killed:
            return None

    async def restart_servers(self) -> None:
        await self.servers.stop()
        self.servers.start()

    def attempts_heard(self) -> set[EpisodeId]:
        """Every attempt that a server was ever told to install, or that was dispatched."""
        heard = {e.episode for e in self.journal if isinstance(e, events.Dispatched)}
        for exchange in self.servers.network.exchanges:
            if exchange.path.endswith("/restore"):
                for named in exchange.body["episode_ids"]:
                    heard.add(EpisodeId(named["rollout_id"], named["attempt"] + 1))
        return heard

    async def check_recovered(self, recovered: Recovered, bumps: dict[str, int], heard_before: set[EpisodeId]) -> None:
        """Open, consistent, each rollout once, at the boundary of the newest checkpoint that is published."""
        assert self.servers.closed() == []
        newest, problems = await self.directory.newest_valid(self.host(Life()).run_id)
        assert problems == []
        assert recovered.checkpoint_id == (newest.checkpoint_id if newest else None)
        assert set(recovered.starts) == {"r1", "r2"}
        for rollout_id, start in recovered.starts.items():
            assert start.episode not in heard_before
            assert start.source.checkpoint_id == recovered.checkpoint_id
            for role in self.servers.roles.values():
                assert not role.marks.refuses(start.episode)
                mine = {e: counts for e, counts in role.restored.items() if e.rollout_id == rollout_id}
                expected = list(range(bumps[recovered.checkpoint_id])) if recovered.checkpoint_id else None
                assert mine == ({start.episode: expected} if expected is not None else {})
                assert not [e for e in role.counts if e.rollout_id == rollout_id]


async def begun(path: Path, checkpoints: int) -> tuple[World, dict[str, int]]:
    """Two episodes, `checkpoints` published ones, each after two more bumps; how many bumps each checkpoint holds."""
    world = World(path)
    host = world.host(Life())
    for episode in (R1, R2):
        await host.record(events.Dispatched(episode, "env"))
    bumps: dict[str, int] = {}
    for number in range(checkpoints + 1):
        for episode in (R1, R2):
            await world.servers.run_episode(episode)
        if number < checkpoints:
            assert await world.collect(Life())
            newest, _ = await world.directory.newest_valid(host.run_id)
            assert newest is not None
            bumps[newest.checkpoint_id] = 2 * (number + 1)
    return world, bumps


EVERY = pytest.mark.parametrize(
    ("stride", "servers_die_too"),
    [(4, False), (13, True), *(pytest.param(1, die, marks=pytest.mark.slow) for die in (False, True))],
)
"""How many deeds lie between two deaths that are tried."""


@EVERY
def test_killed_at_every_deed_of_a_checkpoint(tmp_path: Path, stride: int, servers_die_too: bool) -> None:
    async def one_death(path: Path, deeds: int) -> bool:
        world, bumps = await begun(path, 1)
        lived = await world.collect(Life(deeds))
        newest, _ = await world.directory.newest_valid(world.host(Life()).run_id)
        assert newest is not None
        bumps.setdefault(newest.checkpoint_id, 4)
        if servers_die_too:
            await world.restart_servers()
        heard = world.attempts_heard()
        recovered = await world.recover(Life())
        assert recovered is not None
        await world.check_recovered(recovered, bumps, heard)
        await world.servers.stop()
        return lived

    deeds = 0
    while not run_virtual(one_death(_fresh(tmp_path, deeds), deeds)):
        deeds += stride
    assert deeds > 60


@EVERY
def test_killed_at_every_deed_of_a_recovery_and_again_in_the_next(
    tmp_path: Path, stride: int, servers_die_too: bool
) -> None:
    async def two_deaths(path: Path, deeds: int) -> bool:
        world, bumps = await begun(path, 1)
        await world.restart_servers()
        finished = await world.recover(Life(deeds)) is not None
        if servers_die_too:
            await world.restart_servers()
        await world.recover(Life(max(0, deeds - 7)))
        heard = world.attempts_heard()
        recovered = await world.recover(Life())
        assert recovered is not None
        await world.check_recovered(recovered, bumps, heard)
        await world.servers.stop()
        return finished

    deeds = 0
    while not run_virtual(two_deaths(_fresh(tmp_path, deeds), deeds)):
        deeds += stride
    assert deeds > 60


def _fresh(path: Path, number: int) -> Path:
    path = path / str(number)
    path.mkdir()
    return path


def test_a_dead_controller_freezes_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        world, _ = await begun(tmp_path, 0)
        await world.collect(Life(40))
        assert world.servers.closed() != []
        await asyncio.sleep(CheckpointSettings().commit_timeout_s + world.servers.grace_s + 1.0)
        assert world.servers.closed() == []
        assert await world.servers.roles["tools"].bump(R1) == 3
        await world.servers.stop()

    run_virtual(main())
