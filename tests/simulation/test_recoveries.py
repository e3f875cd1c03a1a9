"""Deaths of servers under a collector that lives: single histories that went wrong once."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import PurePath
from typing import Any

import pytest

from tests.simulation.checks import check
from tests.simulation.deployment import SERVERS, Deployment
from tests.simulation.office import Job

JOBS = (Job(4), Job(5), Job(4, 2))


def live_through(main: Callable[[Deployment], Awaitable[None]], **settings: Any) -> int:
    """Let `main` happen, let everything finish, and check every promise; gives the number of restored attempts."""
    world = Deployment(JOBS, 3, **settings)

    async def all_of_it() -> None:
        await main(world)
        await world.finish()

    try:
        world.run(all_of_it())
        return check(world)
    finally:
        world.close()


@pytest.mark.timeout(30)
def test_a_checkpoint_that_is_due_while_a_server_is_away_waits_for_it_and_time_passes() -> None:
    async def main(world: Deployment) -> None:
        world.collect()
        assert await world.until(lambda: world.life.seen("checkpoint") >= 1)
        world.kill("workbench")
        await asyncio.sleep(20.0)
        taken = world.life.seen("checkpoint")
        await world.boot("workbench")
        assert await world.until(lambda: world.life.seen("checkpoint") > taken)

    live_through(main, checkpoint_every="2s")


def test_starting_over_is_for_the_beginning_of_a_command_not_for_what_dies_under_it() -> None:
    async def main(world: Deployment) -> None:
        world.collect()
        assert await world.until(lambda: world.life.seen("checkpoint") >= 1)
        world.kill(*SERVERS)
        world.kill_collector()
        for name in SERVERS:
            await world.boot(name)
        world.collect(start_over=True)
        assert await world.until(lambda: world.life.seen("checkpoint") >= 2)
        assert world.life.seen("restored") == 0
        world.kill("workbench")
        await world.boot("workbench")
        assert await world.until(lambda: world.life.seen("restored") == 1)

    assert live_through(main, checkpoint_every="3s") > 0


def test_a_rollout_whose_outcome_becomes_durable_during_a_recovery_is_not_run_again() -> None:
    hung = asyncio.Event()

    async def main(world: Deployment) -> None:
        def slow(operation: str, path: PurePath) -> None:
            of_an_outcome = operation == "fsync" and path.name.startswith("outcomes-") and world.life.seen("checkpoint")
            if of_an_outcome and not hung.is_set():
                hung.set()
                world.kill("workbench")
                world.loop.hang(20.0)

        world.disk.before = slow
        world.collect()
        await hung.wait()
        await asyncio.sleep(1.0)
        await world.boot("workbench")

    live_through(main, checkpoint_every="2s")
