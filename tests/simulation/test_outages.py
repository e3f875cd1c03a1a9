"""What the death of the policy's servers costs: no rollout an attempt, and no token before a cut."""

import asyncio

import pytest

from tests.simulation.checks import check
from tests.simulation.deployment import SERVERS, Deployment
from tests.simulation.office import Job

JOBS = [Job(rounds=4) for _ in range(6)]


@pytest.mark.parametrize("away_s", [0.5, 60.0])
def test_rollouts_in_flight_when_their_inference_worker_dies_go_on_in_their_only_attempt(away_s: float) -> None:
    world = Deployment(JOBS, max_attempts=1, checkpoint_every="off")

    async def collect() -> None:
        life = world.collect()
        assert await world.until(lambda: len(world.audit["policy_model"]) >= 6)
        world.kill("worker")
        await asyncio.sleep(away_s)
        await world.boot("worker")
        await life.ended.wait()

    try:
        world.run(collect())
        summary = world.life.summary
        assert summary is not None
        assert (summary.counts.succeeded, summary.counts.failed) == (len(JOBS), 0)
        assert {line["attempt"] for line in world.audit["policy_model"]} == {0}
    finally:
        world.close()


def test_calls_that_were_cut_by_a_checkpoint_go_on_from_their_tokens_when_everything_dies() -> None:
    world = Deployment(JOBS)

    async def collect() -> None:
        world.collect()
        await world.until(lambda: len(world.audit["policy_model"]) >= 6)
        world.life.wishes.checkpoint.set()
        assert await world.until(lambda: world.life.seen("checkpoint") > 0)
        world.kill(*SERVERS)
        world.kill_collector()
        await world.finish()

    try:
        world.run(collect())
        assert check(world)
        participant = world.servers["policy_model"].participant
        assert participant is not None
        counts = participant.role.report().counts
        assert counts["cuts_used"] > 0, counts
        assert "cuts_refused" not in counts
    finally:
        world.close()
