"""An outage of inference is an infrastructure matter: it costs no rollout an attempt, and no progress."""

import asyncio

import pytest

from tests.simulation.deployment import Deployment
from tests.simulation.office import Job

JOBS = [Job(rounds=4) for _ in range(6)]


@pytest.mark.parametrize("away_s", [0.5, 300.0])
def test_rollouts_in_flight_when_their_inference_worker_dies_go_on_in_their_only_attempt(away_s: float) -> None:
    world = Deployment(JOBS, max_attempts=1)

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
