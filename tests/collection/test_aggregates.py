"""What servers make of all results, where they can: asked once, at the end, and never in the way of a run."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gymckpt import jsoncodec
from gymckpt.collection import aggregates, reopening
from gymckpt.wire.gym import AGGREGATE_METRICS_PATH
from tests.collection.deployments import ENVIRONMENT, Collected, PlainEnvironment, judged, typed_row

TASKS = [typed_row(n) for n in range(5)]


async def scored(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
    """A result with a conversation, and something that only its benchmark understands; task 4 fails."""
    number = int(body["task"]["task_id"]["task_id"])
    if number == 4:
        return 422, "unreadable", {}
    response = {"output": ["a long conversation"], "usage": {"total_tokens": number}, "incomplete_details": None}
    return 200, {"reward": float(number % 2), "level": number, "response": response}, {}


class Benchmark(PlainEnvironment):
    """An environment with `/aggregate_metrics`."""

    def __init__(self, reply: Any = None, status: int = 200) -> None:
        super().__init__(scored)
        self.reply = reply if reply is not None else {"key_metrics": {"headline": 0.5}}
        self.status = status
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != AGGREGATE_METRICS_PATH:
            await super().__call__(scope, receive, send)
            return
        message = await receive()
        status, reply = 405, self.reply
        if scope["method"] == "POST":
            self.asked.append(jsoncodec.loads(message["body"]))
            status, reply = self.status, self.reply
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": jsoncodec.dumps(reply)})


def collect(directory: Path, environment: PlainEnvironment) -> Collected:
    collected = Collected(directory)
    collected.network.serve(ENVIRONMENT, environment)
    assert collected.collect(TASKS).exit_code == 1
    return collected


def notes(collected: Collected) -> list[str]:
    return [event["text"] for event in collected.events if event["event"] == "note" and "aggregate" in event["text"]]


def test_a_server_is_given_every_result_once_in_order_without_its_conversation(tmp_path: Path) -> None:
    environment = Benchmark()
    collected = collect(tmp_path / "run", environment)
    (asked,) = environment.asked
    assert [row["_ng_task_index"] for row in asked["verify_responses"]] == [0, 1, 2, 3]
    assert [row["level"] for row in asked["verify_responses"]] == [0, 1, 2, 3]
    assert [row["response"] for row in asked["verify_responses"]] == [{"usage": {"total_tokens": n}} for n in range(4)]
    (entry,) = jsoncodec.loads((tmp_path / "run" / "aggregate_metrics.json").read_bytes())
    assert entry["key_metrics"] == {"headline": 0.5}
    assert entry["_ng_environment_server"] == ENVIRONMENT.instance
    assert notes(collected) == []


def test_a_server_without_the_route_is_not_asked_and_nothing_is_said(tmp_path: Path) -> None:
    collected = collect(tmp_path / "run", PlainEnvironment(scored))
    assert not (tmp_path / "run" / "aggregate_metrics.json").exists()
    assert notes(collected) == []


def test_a_server_that_cannot_tell_is_noted_and_the_run_is_as_complete_as_before(tmp_path: Path) -> None:
    collected = collect(tmp_path / "run", Benchmark({"error": "a bug"}, 500))
    (note,) = notes(collected)
    assert ENVIRONMENT.instance in note
    assert "HTTP 500" in note
    assert collected.events[-1]["event"] == "done"
    assert not (tmp_path / "run" / "aggregate_metrics.json").exists()


def test_more_results_than_fit_a_request_are_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregates, "MAX_REQUEST_BYTES", 100)
    environment = Benchmark()
    (note,) = notes(collect(tmp_path / "run", environment))
    assert "more than fit one request" in note
    assert environment.asked == []


def test_after_a_resume_a_server_is_given_the_results_of_the_whole_run(tmp_path: Path) -> None:
    environment = Benchmark()
    collected = collect(tmp_path / "run", environment)

    async def retry() -> None:
        async with reopening.held(collected.directory, collected.ports) as opened:
            await reopening.reopen(opened, reopening.failed_rollouts(opened), "retry")

    asyncio.run(retry())
    environment.answer = judged
    assert collected.restore().exit_code == 0
    assert [row["_ng_task_index"] for row in environment.asked[-1]["verify_responses"]] == [0, 1, 2, 3, 4]
    assert collected.restore().nothing_to_resume
    assert len(environment.asked) == 2
