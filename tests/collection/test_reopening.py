"""Retry, omit, judge again: explicit, journalled, and one row a rollout afterwards."""

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from gymckpt import jsoncodec
from gymckpt.collection import reopening
from gymckpt.collection.events import Outcome
from gymckpt.collection.rejudging import Rejudged, check_replayable, judge_again
from gymckpt.collection.run import Counts
from gymckpt.errors import NotAsAsked, UsageError
from gymckpt.identity import EpisodeId
from gymckpt.ports import ServerRef
from tests.collection.deployments import Collected, PlainEnvironment, judged, plain, typed_row

TASKS = [typed_row(n) for n in range(4)]
JUDGE = ServerRef("judge", "http://judge")


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


async def retry(collected: Collected, kind: str | None = None) -> list[str]:
    async with reopening.held(collected.directory, collected.ports) as opened:
        chosen = [failed for failed in reopening.failed_rollouts(opened) if kind in (None, failed.kind)]
        await reopening.reopen(opened, chosen, "retry")
        return [failed.rollout_id for failed in chosen]


async def omit(collected: Collected, name: str) -> None:
    async with reopening.held(collected.directory, collected.ports) as opened:
        await reopening.omit(opened, name)


async def judge(collected: Collected, taskset: str | None = None, rollouts: Collection[str] = ()) -> Rejudged:
    ports = collected.ports
    async with reopening.held(collected.directory, ports) as opened:
        return await judge_again(opened, ports, JUDGE, taskset=taskset, rollouts=rollouts)


class Judge:
    """A verifier that gives every answer the same reward and says about itself what it is told to."""

    def __init__(self, mode: str = "stateless", reward: object = 0.75) -> None:
        self.mode = mode
        self.reward = reward
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        reply: Any = self.mode
        if scope["path"] == "/verify":
            self.bodies.append(jsoncodec.loads(message["body"]))
            reply = {"reward": self.reward, "response": self.bodies[-1]["response"]}
        status = 200 if scope["path"] in ("/verify", "/reverify_mode") else 404
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": jsoncodec.dumps(reply)})


def test_retry_reopens_failures_of_a_kind_and_the_next_attempt_has_a_new_number_and_a_fresh_count(
    with_failures: tuple[Collected, PlainEnvironment],
) -> None:
    collected, environment = with_failures
    assert asyncio.run(retry(collected, "http_500")) == [rollout(collected, 1)]
    environment.answer = judged
    assert collected.restore().counts == Counts(4, 3, 1, 0, 0)
    assert [body["episode_id"]["attempt"] for body in environment.bodies] == [3]
    assert sorted(row["_ng_task_index"] for row in collected.lines("rollouts.jsonl")) == [0, 1, 3]


def test_retry_without_a_kind_reopens_every_failure_and_no_result(
    with_failures: tuple[Collected, PlainEnvironment],
) -> None:
    collected, environment = with_failures
    assert len(asyncio.run(retry(collected))) == 2
    environment.answer = judged
    assert collected.restore().counts == Counts(4, 4, 0, 0, 0)
    assert {int(body["task"]["task_id"]["task_id"]) for body in environment.bodies} == {1, 2}


def test_an_omitted_rollout_is_counted_apart_and_never_sent_again(
    with_failures: tuple[Collected, PlainEnvironment],
) -> None:
    collected, environment = with_failures
    asyncio.run(omit(collected, rollout(collected, 1)))
    with pytest.raises(NotAsAsked, match="omitted already"):
        asyncio.run(omit(collected, rollout(collected, 1)))
    with pytest.raises(NotAsAsked, match="its result stays"):
        asyncio.run(omit(collected, rollout(collected, 0)))
    summary = collected.restore()
    assert summary.nothing_to_resume
    assert summary.counts == Counts(4, 2, 1, 1, 0)
    assert environment.bodies == []


def test_a_name_that_is_no_rollout_of_the_run_is_refused(with_failures: tuple[Collected, PlainEnvironment]) -> None:
    collected, _ = with_failures
    collected.network.serve(JUDGE, Judge())
    for name in ("other", "00000000-0-0", rollout(collected, 0)[:-1] + "7"):
        with pytest.raises(UsageError, match="no rollout of run"):
            asyncio.run(omit(collected, name))
        with pytest.raises(UsageError, match="no succeeded rollout"):
            asyncio.run(judge(collected, rollouts=[name]))


def test_judging_again_keeps_the_answer_and_changes_the_reward(
    with_failures: tuple[Collected, PlainEnvironment],
) -> None:
    collected, environment = with_failures
    verifier = Judge()
    collected.network.serve(JUDGE, verifier)
    before = {row["_ng_task_index"]: row["response"] for row in collected.lines("rollouts.jsonl")}
    done = asyncio.run(judge(collected))
    assert (len(done.judged), done.changed, done.kept) == (2, 2, {})
    assert {body["n"] for body in verifier.bodies} == {0, 3}
    after = collected.lines("rollouts.jsonl")
    assert {row["_ng_task_index"]: row["response"] for row in after} == before
    assert {row["reward"] for row in after} == {0.75}
    assert collected.restore().counts == Counts(4, 2, 2, 0, 0)
    assert environment.bodies == []
    verifier.reward = 0.5
    assert asyncio.run(judge(collected, rollouts=[rollout(collected, 0)])).changed == 1
    assert {row["_ng_task_index"]: row["reward"] for row in collected.lines("rollouts.jsonl")} == {0: 0.5, 3: 0.75}


def test_an_answer_that_cannot_be_judged_again_keeps_the_verdict_that_it_had(
    with_failures: tuple[Collected, PlainEnvironment],
) -> None:
    collected, _ = with_failures
    collected.network.serve(JUDGE, Judge(reward=None))
    before = collected.lines("rollouts.jsonl")
    done = asyncio.run(judge(collected))
    assert (done.judged, sorted(done.kept)) == ([], sorted([rollout(collected, 0), rollout(collected, 3)]))
    assert collected.lines("rollouts.jsonl") == before


def test_one_verifier_does_not_judge_answers_of_several_task_sets(tmp_path: Path) -> None:
    other = typed_row(1)
    other["task_id"] = {"taskset": "others", "task_id": "1"}
    collected, _ = plain(tmp_path / "run")
    collected.collect([typed_row(0), other])
    verifier = Judge()
    collected.network.serve(JUDGE, verifier)
    with pytest.raises(UsageError, match="more than one task set"):
        asyncio.run(judge(collected))
    assert verifier.bodies == []
    assert asyncio.run(judge(collected, "others")).judged == [rollout(collected, 1)]
    assert [body["n"] for body in verifier.bodies] == [1]


@pytest.mark.parametrize(("mode", "replayable"), [("stateless", True), ("unsupported", False), ("unknown", False)])
def test_only_a_verifier_that_needs_the_answer_alone_judges_again(tmp_path: Path, mode: str, replayable: bool) -> None:
    collected, _ = plain(tmp_path / "run")
    collected.network.serve(JUDGE, Judge(mode))
    if replayable:
        asyncio.run(check_replayable(collected.ports, JUDGE, None))
    else:
        with pytest.raises(NotAsAsked, match="without its session"):
            asyncio.run(check_replayable(collected.ports, JUDGE, None))


def test_a_new_verdict_whose_reopening_a_crash_prevented_never_counts(
    with_failures: tuple[Collected, PlainEnvironment],
) -> None:
    collected, _ = with_failures
    name = rollout(collected, 0)

    async def cut_short() -> None:
        async with reopening.held(collected.directory, collected.ports) as opened:
            episode = EpisodeId(name, 0)
            await opened.journals.append(Outcome(episode, "succeeded", reward=0.25, opening=1, row={"reward": 0.25}))

    asyncio.run(cut_short())
    assert collected.restore().counts == Counts(4, 2, 2, 0, 0)
    assert {row["_ng_task_index"]: row["reward"] for row in collected.lines("rollouts.jsonl")}[0] == 1.0
    collected.network.serve(JUDGE, Judge(reward=0.5))
    assert asyncio.run(judge(collected, rollouts=[name])).changed == 1
    assert {row["_ng_task_index"]: row["reward"] for row in collected.lines("rollouts.jsonl")}[0] == 0.5
