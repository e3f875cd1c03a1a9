"""Seeded histories: whatever happens to collector, servers, network, disk and clocks, every promise holds."""

import asyncio
import os
import random
import secrets

import pytest

from tests.simulation.checks import check, undisturbed
from tests.simulation.deployment import PARTICIPANTS, SERVERS, Deployment
from tests.simulation.histories import JOBS, play, script
from tests.simulation.office import Job
from tests.simulation.transport import Exchange

FIRST_SEED = int(os.environ.get("GYMCKPT_SEED", "0"))
HISTORIES = int(os.environ.get("GYMCKPT_HISTORIES", "600"))
BATCH = 20


@pytest.mark.parametrize("seed", range(8))
def test_a_history_of_trouble_ends_as_if_nothing_had_happened(seed: int) -> None:
    play(script(seed))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + HISTORIES, BATCH))
def test_many_histories_of_trouble_end_as_if_nothing_had_happened(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            play(script(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}: {script(seed).troubles}")
            raise


def exchanges_of(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    rng = random.Random(seed)
    monkeypatch.setattr(secrets, "token_bytes", lambda size=32: rng.randbytes(size))
    world = Deployment(JOBS[0], seed)
    seen: list[str] = []
    world.network.answered.append(lambda exchange, _: seen.append(f"{world.loop.time():.6f} {_named(exchange)}"))
    try:
        world.run(world.finish())
    finally:
        world.close()
    return seen


def _named(exchange: Exchange) -> str:
    return f"{exchange.server} {exchange.method} {exchange.path.rpartition('/')[2]}"


def test_a_seed_decides_every_exchange_and_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exchanges_of(5, monkeypatch) == exchanges_of(5, monkeypatch)


def test_an_undisturbed_run_leaves_nothing_on_any_server() -> None:
    jobs = (Job(2), Job(3, 2), Job(2, 1, "shell"))
    world = Deployment(jobs)
    try:
        world.run(world.finish())
        check(world)
        for name in PARTICIPANTS:
            participant = world.servers[name].participant
            assert participant is not None
            counts = participant.role.report().counts
            left = {what: count for what, count in counts.items() if not what.startswith("cuts_")}
            assert not any(left.values()), (name, counts)
            assert participant.marks.count == 0
    finally:
        world.close()


def test_restored_episodes_go_on_from_their_boundaries_after_a_kill_of_everything() -> None:
    async def main(world: Deployment) -> None:
        world.collect()
        assert await world.until(lambda: world.life.seen("checkpoint") >= 2)
        world.kill(*SERVERS)
        world.kill_collector()
        await world.finish()

    world = Deployment([Job(4), Job(5), Job(4, 2)], 3, checkpoint_every="5s")
    try:
        world.run(main(world))
        assert world.life.seen("restored") == 1
        assert check(world) >= 2
    finally:
        world.close()


def test_no_line_of_a_killed_process_runs_any_more() -> None:
    reached: list[str] = []

    async def mortal() -> None:
        try:
            await asyncio.sleep(10)
            reached.append("after")
        finally:
            reached.append("finally")

    async def main(world: Deployment) -> None:
        process = world._process("mortal")
        process.run(mortal())
        await asyncio.sleep(5)
        process.kill()
        await asyncio.sleep(100)
        assert reached == []

    world = Deployment([Job(2)])
    try:
        world.run(main(world))
    finally:
        world.close()
    assert reached == ["finally"]


def test_the_undisturbed_run_is_the_same_whatever_the_seed_of_the_network() -> None:
    jobs = JOBS[1]
    world = Deployment(jobs, 99)
    try:
        world.run(world.finish())
        check(world)
    finally:
        world.close()
    assert undisturbed(jobs, False).outcomes
