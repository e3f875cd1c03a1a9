"""Metrics: from every sample of the journal, attempts never among them, failures never as zeros."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gymckpt.collection.metrics import Estimate, estimate, pass_at_k
from gymckpt.collection.reading import read_metrics
from gymckpt.collection.rundirectory import RunPaths
from gymckpt.collection.signals import Wishes
from tests.collection.deployments import Collected, judged, plain, typed_row


def metrics(collected: Collected) -> Any:
    ports = collected.ports
    return asyncio.run(read_metrics(ports.fs, ports.offload, ports.clock, RunPaths(collected.directory)))


def test_pass_at_k_is_the_unbiased_estimator() -> None:
    assert pass_at_k(4, 0, 2) == 0.0
    assert pass_at_k(4, 4, 1) == 1.0
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_at_k(5, 2, 3) == pytest.approx(1 - (3 * 2 * 1) / (5 * 4 * 3))


def test_an_interval_is_students_over_tasks() -> None:
    assert estimate([]) is None
    alone = estimate([0.5])
    assert alone is not None
    assert (alone.value, alone.low) == (0.5, None)
    four = estimate([0.4, 0.4, 0.6, 0.6])
    assert four is not None
    assert four.low == pytest.approx(0.5 - 3.182 * (0.04 / 3 / 4) ** 0.5)
    assert estimate([0.0, 1.0]) == Estimate(0.5, 0.0, 1.0)  # rewards of 0 and 1 have no mean beyond them
    beyond = estimate([0.0, 1.5])
    assert beyond is not None
    assert beyond.low is not None
    assert beyond.low < 0.0
    many = estimate([float(n % 2) for n in range(40)])
    assert many is not None
    assert many.high == pytest.approx(0.5 + 2.0227 * ((10 / 39) / 40) ** 0.5, rel=1e-4)


def test_metrics_after_a_resume_cover_all_samples_of_the_run_and_a_retried_attempt_is_no_sample(tmp_path: Path) -> None:
    failing = {3: 2, 5: 99}

    async def answer(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        task = int(body["task"]["task_id"]["task_id"])
        if failing.get(task, 0) > 0:
            failing[task] -= 1
            return 500, "down", {}
        return await judged(body)

    collected, _ = plain(tmp_path / "run", answer)
    summary = collected.collect([typed_row(n) for n in range(6)])
    assert (summary.counts.failed, summary.attempts) == (1, 10)
    found = metrics(collected)
    assert (found.whole.tasks, found.whole.planned, found.whole.samples) == (6, 6, 5)
    assert found.whole.mean_scored.value == pytest.approx(3 / 5)  # tasks 0, 2 and 4 of 0, 1, 2, 3, 4
    assert found.whole.mean_planned.value == pytest.approx(3 / 6)
    assert found.whole.pass_at == {1: pytest.approx(3 / 5)}
    assert found.whole.pass_at_planned == {1: pytest.approx(3 / 6)}
    assert found.failures == {"http_500": 1}
    assert found.attempts == 10
    assert list(found.by_agent) == ["environment"]


def test_means_weigh_tasks_equally_whatever_their_repeats(tmp_path: Path) -> None:
    collected, _ = plain(tmp_path / "run")
    collected.collect([typed_row(n) for n in range(2)], repeats=4)
    found = metrics(collected)
    assert found.whole.mean_scored.value == 0.5
    assert found.whole.pass_at == {1: 0.5, 2: 0.5, 4: 0.5}


def test_a_summary_tells_the_whole_run_whoever_collected_it(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run")
    wishes = Wishes()

    async def answer(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        if len(environment.bodies) > 4:
            wishes.ask_to_stop()
            await asyncio.sleep(3600)
        return await judged(body)

    environment.answer = answer
    stopped = collected.collect([typed_row(n) for n in range(9)], concurrency=1, wishes=wishes, grace=1.0)
    assert stopped.metrics is None
    environment.answer = judged
    for summary in (collected.restore(), collected.restore()):
        assert summary.metrics is not None
        assert summary.metrics.whole.samples == 9
        assert summary.metrics.whole.mean_scored is not None
        assert summary.metrics.whole.mean_scored.value == pytest.approx(5 / 9)
