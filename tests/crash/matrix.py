"""Every crash point, in a simulated deployment: what is armed, when it fires, and what must follow.

A cell is (crash point, action, phase). Phase `run`: it fires in the first collector's life; `resume`: everything was
killed once before; `again`: everything was killed once more, in the middle of the resume.
"""

import asyncio
import errno
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

from gymckpt import crashpoints
from gymckpt.crashpoints import Action, CrashPointError
from tests.simulation.checks import check
from tests.simulation.deployment import SERVERS, Deployment
from tests.simulation.office import Job
from tests.simulation.processes import ProcessKilled, WorldLoop, current_process

Phase = Literal["run", "resume", "again"]
ACTIONS: tuple[Action, ...] = get_args(Action)
PHASES: tuple[Phase, ...] = get_args(Phase)
JOBS = (Job(3), Job(3, 2), Job(2), Job(2, 1, "shell"))
SEED = 7
PAST_THE_DEADLINE_S = 400.0
"""Longer than any deadline and lease of the simulated deployment."""


def points() -> list[str]:
    """Every declared crash point."""
    return sorted(crashpoints.CRASH_POINTS)


@dataclass
class Armed:
    """Fires once, at the `passage`-th passage of `point` by any simulated process while it is on."""

    point: str
    action: Action
    passage: int = 1
    on: bool = False
    fired_in: str | None = None
    passages: Counter[str] = field(default_factory=Counter)
    hang_s: float = PAST_THE_DEADLINE_S

    def __call__(self, name: str) -> None:
        process = current_process()
        if process is None or process.reaping:
            return
        process.check()
        self.passages[name] += 1
        if not self.on or name != self.point or self.fired_in is not None:
            return
        self.passage -= 1
        if self.passage > 0:
            return
        self.fired_in = process.name
        match self.action:
            case "kill":
                process.kill()
                raise ProcessKilled
            case "error":
                raise CrashPointError(f"crash point {name}")
            case "enospc":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
            case "eio":
                raise OSError(errno.EIO, os.strerror(errno.EIO), name)
            case "hang":
                _running().hang(self.hang_s)


def _running() -> WorldLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WorldLoop)
    return loop


@dataclass(frozen=True)
class Cell:
    """One square of the matrix."""

    point: str
    action: Action
    phase: Phase

    def __str__(self) -> str:
        return f"{self.point}-{self.action}-{self.phase}"


@dataclass(frozen=True)
class Came:
    """What a cell came to."""

    fired_in: str | None
    """The process in which it fired; None if the point was never passed."""
    lives: int
    restored: int


def play(cell: Cell, passage: int = 1, seed: int = SEED) -> Came:
    """Let the cell happen, let everything finish, and check every promise."""
    armed = Armed(cell.point, cell.action, passage)
    crashpoints.watch(armed)
    # `keep` 1: pruning is part of the scenario. A last ledger outlives its server's death.
    world = Deployment(JOBS, seed, checkpoint_every="3s", keep=1, lasting_ledger=True)
    try:
        world.run(_play(world, armed, cell.phase))
        restored = check(world)
        return Came(armed.fired_in, len(world.lives), restored)
    finally:
        crashpoints.watch(None)
        world.close()


async def _play(world: Deployment, armed: Armed, phase: Phase) -> None:
    if phase != "run":
        world.collect()
        assert await world.until(lambda: world.life.seen("checkpoint") >= 2), "no checkpoint to stand on"
        await _kill_everything(world)
    if phase == "again":
        world.collect()
        await world.until(lambda: armed.passages["collector.restore.done"] > 0)
        await _kill_everything(world)
    armed.on = True
    world.collect()
    await world.until(lambda: armed.fired_in is not None, 120)
    if armed.fired_in in SERVERS and armed.action == "kill":
        await asyncio.sleep(1.0)
        await world.boot(armed.fired_in)
    await world.finish()


async def _kill_everything(world: Deployment) -> None:
    world.kill(*SERVERS)
    world.kill_collector()
    for name in SERVERS:
        await world.boot(name)
