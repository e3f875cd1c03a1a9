"""Retry, omit, judge again: explicit, journalled, and one row a rollout afterwards."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gymckpt import jsoncodec
from gymckpt.collection.revising import omit, retry, verify_again
from gymckpt.collection.run import Counts
from gymckpt.errors import UsageError
from gymckpt.ports import ServerRef
from tests.collection.deployments import Collected, PlainEnvironment, judged, plain, typed_row

TASKS = [typed_row(n) for n in range(4)]


@pytest.fixture
def with_failures(tmp_path: Path) -> tuple[Collected, PlainEnvironment]:
    """Tasks 1 and 2 failed, by different kinds; 0 and 3 succeeded."""

    async def answer(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        task = int(body["task"]["task_id"]["task_id"])
        if task in (1, 2):
            return (500 if task == 1 else 422), "down", {}
        return await judged(body)

    collected, environment = plain(tmp_path / "run", answer)
    assert collected.collect(TASKS).counts == Counts(4, 2, 2, 0, 0)
    environment.bodies.clear()
    return collected, environment


def rollout(collected: Collected, task: int) -> str:
    rows = collected.lines("rollouts.jsonl") + collected.lines("failures.jsonl")
    return next(str(row["_ng_rollout_id"]) for row in rows if row["_ng_task_index"] == task)


def test_retry_reopens_failures_of_a_kind_and_the_next_attempt_has_a_new_number_and_a_fresh_count(
    with_failures: tuple[Collected, PlainEnvironment],
) -> None:
    collected, environment = with_failures
    revised = asyncio.run(retry(collected.ports, collected.directory, kinds={"http_500"}))
    assert revised.rollouts == (rollout(collected, 1),)
    environment.answer = judged
    assert collected.restore().counts == Counts(4, 3, 1, 0, 0)
    assert [body["episode_id"]["attempt"] for body in environment.bodies] == [3]
    assert sorted(row["_ng_task_index"] for row in collected.lines("rollouts.jsonl")) == [0, 1, 3]


def test_retry_without_a_kind_reopens_every_failure_and_no_result(
    with_failures: tuple[Collected, PlainEnvironment],
) -> None:
    collected, environment = with_failures
    assert len(asyncio.run(retry(collected.ports, collected.directory)).rollouts) == 2
    environment.answer = judged
    assert collected.restore().counts == Counts(4, 4, 0, 0, 0)
    assert {int(body["task"]["task_id"]["task_id"]) for body in environment.bodies} == {1, 2}


def test_a_reopened_result_has_one_row_afterwards_that_of_its_newest_outcome(
    with_failures: tuple[Collected, PlainEnvironment],
) -> None:
    collected, environment = with_failures
    name = rollout(collected, 0)
    asyncio.run(retry(collected.ports, collected.directory, rollouts=[name]))
    assert [row["_ng_task_index"] for row in collected.lines("rollouts.jsonl")] == [3]

    async def other(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        return 200, {"reward": 0.25}, {}

    environment.answer = other
    assert collected.restore().counts == Counts(4, 2, 2, 0, 0)
    again = [row for row in collected.lines("rollouts.jsonl") if row["_ng_task_index"] == 0]
    assert [(row["reward"], row["_ng_attempt_index"]) for row in again] == [(0.25, 1)]


def test_an_omitted_rollout_is_counted_apart_and_never_sent_again(
    with_failures: tuple[Collected, PlainEnvironment],
) -> None:
    collected, environment = with_failures
    names = [rollout(collected, 1), rollout(collected, 0)]
    assert len(asyncio.run(omit(collected.ports, collected.directory, names)).rollouts) == 2
    assert asyncio.run(omit(collected.ports, collected.directory, names)).rollouts == ()
    summary = collected.restore()
    assert summary.nothing_to_resume
    assert summary.counts == Counts(4, 1, 1, 2, 0)
    assert environment.bodies == []
    assert [row["_ng_task_index"] for row in collected.lines("rollouts.jsonl")] == [3]


def test_a_name_that_is_no_rollout_of_the_run_is_refused(with_failures: tuple[Collected, PlainEnvironment]) -> None:
    collected, _ = with_failures
    for name in ("other", "00000000-0-0", rollout(collected, 0)[:-1] + "7"):
        with pytest.raises(UsageError, match="no rollout of run"):
            asyncio.run(omit(collected.ports, collected.directory, [name]))


def test_judging_again_keeps_the_answer_and_changes_the_reward(
    with_failures: tuple[Collected, PlainEnvironment],
) -> None:
    collected, _ = with_failures
    judge = ServerRef("judge", "http://judge")
    bodies: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bodies.append(jsoncodec.loads((await receive())["body"]))
        body = jsoncodec.dumps({"reward": 0.75, "response": bodies[-1]["response"]})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    collected.network.serve(judge, app)
    before = {row["_ng_task_index"]: row["response"] for row in collected.lines("rollouts.jsonl")}
    revised = asyncio.run(verify_again(collected.ports, collected.directory, judge))
    assert len(revised.rollouts) == 2
    assert {body["n"] for body in bodies} == {0, 3}
    after = collected.lines("rollouts.jsonl")
    assert {row["_ng_task_index"]: row["response"] for row in after} == before
    assert {row["reward"] for row in after} == {0.75}
    assert collected.restore().counts == Counts(4, 2, 2, 0, 0)
