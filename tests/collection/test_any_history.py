"""Checkpoints, recoveries, deaths of collector and servers, lost messages and expired leases, in any order."""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gymckpt import coordination
from gymckpt.collection import events
from gymckpt.collection.candidates import find_candidates
from gymckpt.collection.checkpointing import Checkpointer, CheckpointSettings
from gymckpt.collection.recovery_procedure import Recovered, RecoverySettings, recover
from gymckpt.errors import GymckptError
from gymckpt.identity import EpisodeId
from tests.collection.test_killed_anywhere import Killed, Life, MortalNetwork, World
from tests.simulation.clock import run_virtual
from tests.simulation.counters import KINDS, TOKEN
from tests.simulation.transport import Fault, FaultKind

ROLLOUTS = ("r0", "r1", "r2", "r3")
FAULTS: tuple[FaultKind, ...] = ("refused", "lost_request", "lost_reply", "delay_request", "delay_reply")
OPERATIONS = ("prepare", "commit", "renew", "resume", "retire", "restore", "status", "probe", "forget")


@dataclass
class History:
    """One run through everything, driven by a seed."""

    world: World
    rng: random.Random
    current: dict[str, EpisodeId] = field(default_factory=dict)
    """What the collector that lives now has in flight; a dead one has nothing, and no outcome reaches it."""
    snapshots: dict[str, dict[EpisodeId, dict[str, list[int]]]] = field(default_factory=dict)
    """By published checkpoint: for each continued episode what each server held."""
    used: set[EpisodeId] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)

    async def act(self) -> None:
        """One more happening."""
        act = self.rng.choice(
            [self.bump, self.bump, self.checkpoint, self.checkpoint, self.fault, self.restart, self.recover, self.wait]
        )
        await act()

    async def bump(self) -> None:
        for episode in self.current.values():
            for role in self.world.servers.roles.values():
                if episode in role.counts and role.gate.is_open:
                    await role.bump(episode)

    async def fault(self) -> None:
        self.world.servers.network.faults.append(
            Fault(
                self.rng.choice(FAULTS),
                self.rng.choice(list(KINDS)),
                "/" + self.rng.choice(OPERATIONS),
                times=self.rng.choice([1, 1, 2, 30]),
                delay_s=self.rng.choice([0.5, 20.0, 400.0]),
            )
        )

    async def restart(self) -> None:
        names = self.rng.sample(list(KINDS), self.rng.choice([1, 1, 4]))
        await self.world.servers.stop(names)
        self.world.servers.start(names)

    async def wait(self) -> None:
        await asyncio.sleep(self.rng.choice([1.0, 100.0, 2000.0]))

    async def checkpoint(self) -> None:
        if not self.current:
            return
        servers, life = self.world.servers, self.life()
        network, host = MortalNetwork(servers.network, life), self.world.host(life)
        host.flying = dict.fromkeys(self.current.values(), "env")
        held = {
            episode: {name: list(role.counts.get(episode, [])) for name, role in servers.roles.items()}
            for episode in self.current.values()
        }
        try:
            deployment = await coordination.discover(servers.servers, network, TOKEN, servers.deadline())
            checkpointer = Checkpointer(
                deployment,
                network,
                TOKEN,
                self.world.directory,
                host,
                CheckpointSettings(),
                servers.clock,
                fs=servers.fs,
                offload=servers.offload,
            )
            await checkpointer.take()
        except Killed:
            self.current = {}
        except GymckptError:
            pass
        for listed in await self.world.directory.listing():
            if listed.published is not None and listed.checkpoint_id not in self.snapshots:
                self.snapshots[listed.checkpoint_id] = {e: held[e] for e in listed.published.collection.continued}

    async def recover(self) -> None:
        self.current = {}
        with suppress(Killed, GymckptError):
            await self.recover_once(self.life())

    def life(self) -> Life:
        return Life(self.rng.choice([None, self.rng.randrange(150)]))

    async def recover_once(self, life: Life) -> None:
        """Recover and go on; raises what the collector would."""
        servers = self.world.servers
        network, host = MortalNetwork(servers.network, life), self.world.host(life)
        deployment = await coordination.discover(servers.servers, network, TOKEN, servers.deadline())
        found, problems = await find_candidates(self.world.directory, host.run_id)
        assert problems == []
        recovered = await recover(
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
        await self._go_on(recovered)

    async def _go_on(self, recovered: Recovered) -> None:
        """Check what the recovery left, and dispatch, as a collector does."""
        servers, host = self.world.servers, self.world.host(Life())
        assert servers.closed() == []
        assert set(recovered.starts) == set(ROLLOUTS) - self.finished
        self.current = {}
        for rollout_id, start in recovered.starts.items():
            assert start.episode not in self.used
            self.used.add(start.episode)
            recorded = EpisodeId(rollout_id, start.source.attempt or 0)
            for name, role in servers.roles.items():
                restored = [counts for e, counts in role.restored.items() if e.rollout_id == rollout_id]
                if start.source.checkpoint_id is None:
                    assert restored == []
                else:
                    assert restored == [self.snapshots[start.source.checkpoint_id][recorded][name]]
                assert not [e for e in role.counts if e.rollout_id == rollout_id]
            await host.record(events.Dispatched(start.episode, "env", start.source))
            await servers.run_episode(start.episode, bumps=self.rng.choice([0, 1, 2]))
            self.current[rollout_id] = start.episode

    async def finish_one(self) -> None:
        """A rollout gets its outcome."""
        if self.current and self.rng.random() < 0.3:
            rollout_id, episode = self.current.popitem()
            await self.world.host(Life()).record(events.Outcome(episode, "succeeded"))
            self.finished.add(rollout_id)
            for role in self.world.servers.roles.values():
                role.counts.pop(episode, None)


async def live_through(path: Path, seed: int) -> int:
    """Play the history of `seed`; how many checkpoints were published in it."""
    history = History(World(path), random.Random(seed))
    host = history.world.host(Life())
    for rollout_id in ROLLOUTS:
        episode = EpisodeId(rollout_id)
        await host.record(events.Dispatched(episode, "env"))
        await history.world.servers.run_episode(episode)
        history.current[rollout_id] = episode
        history.used.add(episode)
    for _ in range(12):
        await history.act()
        await history.finish_one()
    history.world.servers.network.faults.clear()
    await asyncio.sleep(5000)
    assert history.world.servers.closed() == []
    await history.recover_once(Life())
    await history.world.servers.stop()
    return len(history.snapshots)


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 600), marks=[pytest.mark.slow])])
@pytest.mark.timeout(900)
def test_any_history_ends_in_a_recovery_onto_one_instant_with_every_rollout_once(tmp_path: Path, seeds: range) -> None:
    published = 0
    for seed in seeds:
        path = tmp_path / str(seed)
        path.mkdir()
        try:
            published += run_virtual(live_through(path, seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert published > len(seeds)
