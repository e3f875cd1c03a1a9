"""Seeded histories of trouble: what befalls a simulated deployment, when, and whom."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tests.simulation.checks import check, check_gates
from tests.simulation.deployment import SERVERS, Deployment
from tests.simulation.office import RESTART_TASKSET, Job
from tests.simulation.transport import Fault, FaultKind

Kind = Literal[
    "kill_collector",
    "kill_everything",
    "kill_server",
    "kill_two_servers",
    "power_cut",
    "pause_collector",
    "rob_collector",
    "pause_server",
    "jump_clock",
    "fault",
    "stop",
    "checkpoint",
    "second_collector",
]
WEIGHTS: dict[Kind, int] = {"kill_collector": 3, "kill_everything": 3, "kill_server": 3, "fault": 4}
PATHS = ("prepare", "commit", "renew", "resume", "restore", "retire", "forget", "status", "/run", "/v1/responses",
         "/add", "/verify", "/seed_session", "/v1/agent_sessions", "/close", "/close_session")  # fmt: skip
FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)


@dataclass(frozen=True)
class Trouble:
    """One thing that happens `after_s` the one before, to `target`, as strong as `amount` in [0, 1)."""

    kind: Kind
    after_s: float
    target: str = ""
    path: str = ""
    fault: FaultKind = "lost_reply"
    amount: float = 0.0


@dataclass(frozen=True)
class Script:
    """One history: a function of its seed."""

    seed: int
    jobs: tuple[Job, ...]
    troubles: tuple[Trouble, ...]
    replayed: bool = False
    lasting_ledger: bool = False
    settings: dict[str, Any] = field(default_factory=dict, hash=False)


def script(seed: int) -> Script:
    """The history of this seed."""
    rng = random.Random(seed)
    jobs = JOBS[rng.randrange(len(JOBS))]
    kinds: list[Kind] = list(get_args(Kind))
    weights = [WEIGHTS.get(kind, 1) for kind in kinds]
    troubles = tuple(
        Trouble(
            kind=rng.choices(kinds, weights)[0],
            after_s=rng.choice([0.3, 3.0, 10.0]) * rng.random(),
            target=rng.choice(SERVERS),
            path=rng.choice(PATHS),
            fault=rng.choice(FAULTS),
            amount=rng.random(),
        )
        for _ in range(rng.randint(1, 7))
    )
    settings = {
        "checkpoint_every": rng.choice(["2s", "4s", "7s", "1ep"]),
        "concurrency": rng.choice([2, 3, 6]),
        "keep": rng.choice([1, 2, 50]),
    }
    return Script(seed, jobs, troubles, rng.random() < 0.5, rng.random() < 0.5, settings)


def _jobs() -> list[tuple[Job, ...]]:
    rng = random.Random(20261129)
    found = []
    for _ in range(8):
        jobs = [Job(rng.randint(2, 4), rng.choice([1, 1, 2])) for _ in range(rng.randint(2, 4))]
        if rng.random() < 0.5:
            jobs.append(Job(2, 1, RESTART_TASKSET))
        found.append(tuple(jobs))
    return found


JOBS = _jobs()
"""Few, so that each has its undisturbed run only once."""


@dataclass(frozen=True)
class Told:
    """What a history came to."""

    lives: int
    checkpoints: int
    restored: int
    elapsed_s: float


def play(given: Script) -> Told:
    """Let it happen, then let everything finish, and check every promise."""
    world = Deployment(
        given.jobs, given.seed, replayed=given.replayed, lasting_ledger=given.lasting_ledger, **given.settings
    )
    try:
        world.run(_play(world, given.troubles))
        world.run(world.finish())
        restored = check(world, given.replayed)
        return Told(len(world.lives), sum(life.seen("checkpoint") for life in world.lives), restored, world.loop.time())
    finally:
        world.close()


async def _play(world: Deployment, troubles: tuple[Trouble, ...]) -> None:
    world.collect()
    for trouble in troubles:
        await asyncio.sleep(trouble.after_s)
        if not world.collecting:
            world.collect()
            await asyncio.sleep(trouble.after_s)
        await befall(world, trouble)
        check_gates(world)


async def befall(world: Deployment, trouble: Trouble) -> None:
    """Do it."""
    amount = trouble.amount
    match trouble.kind:
        case "kill_collector":
            world.kill_collector()
            await asyncio.sleep(0.5 if amount < 0.8 else 5000 * amount)
        case "kill_everything":
            world.kill(*SERVERS)
            world.kill_collector()
            await _boot_all(world)
        case "power_cut":
            world.power_cut()
            await _boot_all(world)
        case "kill_server":
            await _kill_servers(world, amount, trouble.target)
        case "kill_two_servers":
            await _kill_servers(world, amount, trouble.target, "workbench" if amount < 0.5 else "agent")
        case "pause_collector":
            world.life.process.stop()
            await asyncio.sleep(20 if amount < 0.5 else 6000 * amount)
            world.life.process.let_go()
        case "rob_collector":
            robbed = world.life
            robbed.process.stop()
            await asyncio.sleep(1000 * amount)
            world.collect(steal_lock=True)
            await asyncio.sleep(10 * amount)
            robbed.process.let_go()
        case "pause_server":
            world.servers[trouble.target].process.stop()
            await asyncio.sleep(100 * amount * amount)
            world.servers[trouble.target].process.let_go()
        case "jump_clock":
            process = world.life.process if amount < 0.5 else world.servers[trouble.target].process
            process.skew_s += 20_000 * (amount - 0.25) if amount < 0.5 else 20_000 * (amount - 0.75)
        case "fault":
            delay_s = 0.2 if amount < 0.4 else 100 * amount
            world.network.faults.append(
                Fault(trouble.fault, trouble.target, trouble.path, 1 + int(amount * 2), delay_s=delay_s)
            )
        case "stop":
            world.life.wishes.ask_to_stop()
            if amount > 0.7:
                world.life.wishes.ask_to_stop()
            await world.until(world.life.ended.is_set, 60)
        case "checkpoint":
            world.life.wishes.checkpoint.set()
        case "second_collector":
            first, alive = world.life, world.collecting
            second = world.collect()
            await world.until(second.ended.is_set, 5)
            if alive and not first.ended.is_set():
                assert second.error is not None
                assert "is held by" in str(second.error)
                world.lives.remove(second)


async def _kill_servers(world: Deployment, amount: float, *names: str) -> None:
    world.kill(*names)
    await asyncio.sleep(0.1 if amount < 0.4 else 3.0 if amount < 0.8 else 100.0)
    for name in names:
        await world.boot(name)


async def _boot_all(world: Deployment) -> None:
    for name in SERVERS:
        await world.boot(name)
