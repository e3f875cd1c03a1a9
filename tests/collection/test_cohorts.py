"""Cohorts: admitted as a whole, counted as a whole, whatever happens between two of their outcomes."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gymckpt import crashpoints
from gymckpt.collection.run import Counts
from gymckpt.crashpoints import CrashPointError
from gymckpt.errors import UsageError
from tests.collection.deployments import Collected, plain, typed_row


def member(number: int, group: int) -> dict[str, Any]:
    made = typed_row(number)
    made["task_input"]["task_data"]["group"] = group
    return made


ROWS = [member(n, n % 2) for n in range(6)]


@dataclass
class Comparison:
    """A verifier that answers nobody of a group before all of it has come, as many at a time as the group has."""

    size: int
    waiting: dict[int, list[asyncio.Future[float]]] = field(default_factory=dict)
    broken: Callable[[dict[str, Any]], bool] = lambda body: False

    async def __call__(self, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        if self.broken(body):
            return 500, "down", {}
        group = body["task"]["task_input"]["task_data"]["group"]
        here = self.waiting.setdefault(group, [])
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        here.append(future)
        if len(here) == self.size:
            del self.waiting[group]
            for place, one in enumerate(here):
                one.set_result(float(place))
        return 200, {"reward": await future}, {}


def compared(tmp_path: Path, size: int) -> tuple[Collected, Comparison, list[dict[str, Any]]]:
    comparison = Comparison(size)
    answer: Callable[[dict[str, Any]], Awaitable[tuple[int, Any, dict[str, str]]]] = comparison
    collected, environment = plain(tmp_path / "run", answer)
    return collected, comparison, environment.bodies


def test_a_cohort_is_admitted_as_a_whole_and_every_member_gets_its_outcome(tmp_path: Path) -> None:
    collected, _, bodies = compared(tmp_path, 6)
    summary = collected.collect(ROWS, cohort="group", repeats=2, concurrency=6)
    assert summary.counts == Counts(12, 12, 0, 0, 0)
    assert {body["task"]["task_input"]["task_data"]["group"] for body in bodies[:6]} == {0}
    assert len(collected.lines("rollouts.jsonl")) == 12


def test_a_concurrency_below_a_cohorts_size_is_refused_because_it_would_wait_for_ever(tmp_path: Path) -> None:
    collected, _, bodies = compared(tmp_path, 3)
    with pytest.raises(UsageError, match="a cohort has 3 rollouts, --concurrency is 2"):
        collected.collect(ROWS, cohort="group", concurrency=2)
    assert bodies == []


def test_a_member_that_fails_for_good_takes_its_cohort_with_it_and_no_other(tmp_path: Path) -> None:
    collected, comparison, _ = compared(tmp_path, 3)
    comparison.broken = lambda body: body["task"]["task_id"]["task_id"] == "2"
    summary = collected.collect(ROWS, cohort="group", max_attempts=2)
    assert summary.counts == Counts(6, 3, 3, 0, 0)
    final = {row["_ng_task_index"]: row["failure_kind"] for row in collected.lines("failures.jsonl") if row["final"]}
    assert final == {0: "cohort", 2: "http_500", 4: "cohort"}


def test_all_of_a_cohort_begin_again_when_a_member_fails_after_others_were_judged(tmp_path: Path) -> None:
    comparison = Comparison(3)

    async def late(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        judged = await comparison(body)
        if body["task"]["task_id"]["task_id"] != "2" or body["episode_id"]["attempt"] > 0:
            return judged
        await asyncio.sleep(0.2)  # until its siblings' replies are durable
        return 500, "broken off", {}

    collected, environment = plain(tmp_path / "run", late)
    assert collected.collect(ROWS, cohort="group", max_attempts=2).counts == Counts(6, 6, 0, 0, 0)
    tried = sorted((body["task"]["task_id"]["task_id"], body["episode_id"]["attempt"]) for body in environment.bodies)
    assert tried == [("0", 0), ("0", 1), ("1", 0), ("2", 0), ("2", 1), ("3", 0), ("4", 0), ("4", 1), ("5", 0)]
    assert [row["failure_kind"] for row in collected.lines("failures.jsonl")] == ["http_500"]
    assert {row["_ng_task_index"]: row["_ng_attempt_index"] for row in collected.lines("rollouts.jsonl")} == {
        0: 1, 1: 0, 2: 1, 3: 0, 4: 1, 5: 0
    }  # fmt: skip


def test_a_member_that_has_not_gone_out_when_its_cohort_fails_never_does(tmp_path: Path) -> None:
    comparison = Comparison(3)

    async def busy_or_broken(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        match body["task"]["task_id"]["task_id"]:
            case "0":
                return 429, {}, {"retry-after": "1"}
            case "2":
                await asyncio.sleep(0.05)  # until the other one waits for its turn
                return 422, "unreadable", {}
        return await comparison(body)

    collected, environment = plain(tmp_path / "run", busy_or_broken)
    assert collected.collect(ROWS, cohort="group", max_attempts=2).counts == Counts(6, 3, 3, 0, 0)
    assert [body["task"]["task_id"]["task_id"] for body in environment.bodies].count("0") == 1


def test_a_crash_between_two_outcomes_of_a_cohort_is_made_good_without_asking_anybody(tmp_path: Path) -> None:
    collected, _, bodies = compared(tmp_path, 3)
    # Three replies of the first cohort pass, then its first outcome; the second one is not written.
    crashpoints.arm("collector.outcome.before_journal:error:5")
    try:
        with pytest.raises(CrashPointError):
            collected.collect(ROWS, cohort="group", concurrency=3)
    finally:
        crashpoints.arm(None)
    assert len(bodies) == 3
    summary = collected.restore()
    assert summary.counts == Counts(6, 6, 0, 0, 0)
    assert len(bodies) == 6
    rows = collected.lines("rollouts.jsonl")
    assert sorted(row["_ng_task_index"] for row in rows) == list(range(6))
    assert sorted(row["reward"] for row in rows) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_a_crash_before_the_first_outcome_runs_the_whole_cohort_again(tmp_path: Path) -> None:
    collected, comparison, bodies = compared(tmp_path, 3)
    crashpoints.arm("collector.outcome.before_journal:error:3")
    try:
        with pytest.raises(CrashPointError):
            collected.collect(ROWS, cohort="group", concurrency=3)
    finally:
        crashpoints.arm(None)
    comparison.waiting.clear()
    assert collected.restore().counts == Counts(6, 6, 0, 0, 0)
    attempts = [body["episode_id"]["attempt"] for body in bodies]
    assert attempts == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert len(collected.lines("rollouts.jsonl")) == 6


def test_a_limit_leaves_out_the_cohort_that_it_would_cut_in_two(tmp_path: Path) -> None:
    collected, _, bodies = compared(tmp_path, 3)
    assert collected.collect(ROWS, cohort="group", limit=5).counts == Counts(3, 3, 0, 0, 0)
    assert len(bodies) == 3


def test_a_limit_below_the_first_cohort_is_refused(tmp_path: Path) -> None:
    collected, _, bodies = compared(tmp_path, 3)
    with pytest.raises(UsageError, match="--limit 2 is less than the rows of the first cohort"):
        collected.collect(ROWS, cohort="group", limit=2)
    assert bodies == []
