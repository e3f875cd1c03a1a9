"""Dispatch: what is sent again, what is not, and what one rollout's trouble does to the others."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymckpt.collection import attempts as attempts_module
from gymckpt.collection import collector
from gymckpt.collection.progress import Progress
from gymckpt.collection.run import Counts
from gymckpt.collection.settings import CollectSettings
from gymckpt.errors import ServerError
from tests.collection.deployments import Answer, judged, plain, rows, typed_row
from tests.simulation.transport import Fault


def number(body: dict[str, Any]) -> int:
    return int(body["task"]["task_id"]["task_id"])


def scripted(*answers: tuple[int, Any, dict[str, str]]) -> Answer:
    """Task 0 gets these answers in turn, then judgement; every other task gets judgement."""
    left = list(answers)

    async def answer(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        return left.pop(0) if number(body) == 0 and left else await judged(body)

    return answer


def attempts(bodies: list[dict[str, Any]], task: int = 0) -> list[int]:
    return [body["episode_id"]["attempt"] for body in bodies if number(body) == task]


def test_a_failed_attempt_is_followed_by_the_next_one_and_recorded_apart_from_results(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run", scripted((500, "boom", {})))
    summary = collected.collect([typed_row(n) for n in range(3)])
    assert (summary.exit_code, summary.counts) == (0, Counts(3, 3, 0, 0, 0))
    assert attempts(environment.bodies) == [0, 1]
    (failure,) = collected.lines("failures.jsonl")
    assert (failure["failure_kind"], failure["failure_reason"], failure["final"]) == ("http_500", "boom", False)
    assert {row["_ng_attempt_index"] for row in collected.lines("rollouts.jsonl") if row["_ng_task_index"] == 0} == {1}


def test_a_rollout_has_failed_after_max_attempts_and_the_others_go_on(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run", scripted(*[(500, "boom", {})] * 9))
    summary = collected.collect([typed_row(n) for n in range(4)], max_attempts=2)
    assert (summary.exit_code, summary.counts) == (1, Counts(4, 3, 1, 0, 0))
    assert attempts(environment.bodies) == [0, 1]
    assert [row["final"] for row in collected.lines("failures.jsonl")] == [False, True]


def outage(kind: str) -> tuple[int, Any, dict[str, str]]:
    return 200, {"reward": 0.0, "failure_kind": kind, "failure_reason": "nobody there"}, {}


@pytest.mark.parametrize("kind", ["backend_unavailable", "not_sent"])
def test_outages_never_use_up_a_rollouts_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(attempts_module, "OUTAGE_PAUSE_S", 0.01)
    collected, environment = plain(tmp_path / "run", scripted(*[outage(kind)] * 4))
    summary = collected.collect([typed_row(n) for n in range(3)], max_attempts=1)
    assert summary.counts == Counts(3, 3, 0, 0, 0)
    assert attempts(environment.bodies) == [0, 1, 2, 3, 4]


def test_an_outage_that_lasts_stops_the_run_which_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts_module, "OUTAGE_PAUSE_S", 0.05)
    collected, environment = plain(tmp_path / "run", scripted(*[outage("backend_unavailable")] * 10**3))
    with pytest.raises(ServerError, match=r"backend_unavailable: nobody there"):
        collected.collect([typed_row(0)], max_attempts=1, server_timeout=0.2)
    assert collected.events[-1]["exit_code"] == 5
    environment.answer = judged
    assert collected.restore(max_attempts=1).counts.succeeded == 1


def test_a_terminal_failure_is_not_tried_again(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run", scripted((422, {"detail": "no"}, {})))
    assert collected.collect([typed_row(0)]).counts == Counts(1, 0, 1, 0, 0)
    assert attempts(environment.bodies) == [0]


def test_a_busy_server_gets_the_same_attempt_again_after_the_time_it_asked_for(tmp_path: Path) -> None:
    collected, environment = plain(
        tmp_path / "run", scripted((429, {}, {"retry-after": "0"}), (503, {}, {"retry-after": "0"}))
    )
    assert collected.collect([typed_row(0)]).counts.succeeded == 1
    assert attempts(environment.bodies) == [0, 0, 0]


def test_a_closed_server_gets_the_same_attempt_again(tmp_path: Path) -> None:
    closed: tuple[int, Any, dict[str, str]] = (409, {"error": {"code": "admission_closed", "detail": ""}}, {})
    collected, environment = plain(tmp_path / "run", scripted(closed))
    assert collected.collect([typed_row(0)], max_attempts=1).counts.succeeded == 1
    assert attempts(environment.bodies) == [0, 0]


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (429, {}, "environment asks to be left alone"),
        (409, {"error": {"code": "admission_closed", "detail": ""}}, "environment is closed"),
    ],
)
def test_who_begins_nothing_is_told_of_until_it_does(tmp_path: Path, status: int, body: Any, told: str) -> None:
    collected, environment = plain(tmp_path / "run")
    snapshots: list[Callable[[], Progress]] = []
    paused: list[tuple[str, ...]] = []

    async def answer(asked: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        paused.append(snapshots[0]().paused)
        return await judged(asked) if len(environment.bodies) > 1 else (status, body, {"retry-after": "0"})

    environment.answer = answer
    source = rows([typed_row(0)])
    settings = CollectSettings(tasks=source.name)
    running = collector.collect(
        settings,
        collected.directory,
        collected.servers,
        collected.ports,
        on_progress=snapshots.append,
        source=source,
    )
    assert asyncio.run(running).counts.succeeded == 1
    assert paused == [(), (told,)]


def test_a_refused_connection_gets_the_same_attempt_again_and_is_no_failure(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run")
    collected.network.faults.append(Fault("refused", "environment", "/run", times=2))
    assert collected.collect([typed_row(0)], max_attempts=1).counts.succeeded == 1
    assert attempts(environment.bodies) == [0]


@pytest.mark.parametrize("kind", ["lost_request", "lost_reply"])
def test_a_request_that_may_have_been_received_is_never_sent_again_as_the_same_attempt(
    tmp_path: Path, kind: Any
) -> None:
    collected, environment = plain(tmp_path / "run")
    collected.network.faults.append(Fault(kind, "environment", "/run"))
    assert collected.collect([typed_row(0)]).counts.succeeded == 1
    assert attempts(environment.bodies) == ([0, 1] if kind == "lost_reply" else [1])


def test_a_hung_rollout_ends_at_its_time_limit_and_the_run_ends_too(tmp_path: Path) -> None:
    async def hang(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        if number(body) == 0:
            await asyncio.sleep(3600)
        return await judged(body)

    collected, _ = plain(tmp_path / "run", hang)
    summary = collected.collect([typed_row(n) for n in range(3)], rollout_timeout=0.3, max_attempts=2)
    assert summary.counts == Counts(3, 2, 1, 0, 0)
    assert {row["failure_kind"] for row in collected.lines("failures.jsonl")} == {"timeout"}


def test_no_more_are_in_flight_than_allowed_in_all_and_for_one_name(tmp_path: Path) -> None:
    now, most = 0, 0

    async def counting(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.005)
        now -= 1
        return await judged(body)

    collected, _ = plain(tmp_path / "run", counting)
    collected.collect([typed_row(n) for n in range(30)], concurrency=7)
    assert most == 7
    most = 0
    again, _ = plain(tmp_path / "again", counting)
    again.collect([typed_row(n) for n in range(10)], concurrency=7, agent_concurrency={"environment": 2})
    assert most == 2


def test_a_server_that_stays_away_stops_the_run_and_is_named(tmp_path: Path) -> None:
    collected, _ = plain(tmp_path / "run")
    collected.network.faults += [
        Fault("refused", "environment", "/run", times=10**6),
        Fault("refused", "environment", "/", times=10**6),
    ]
    with pytest.raises(ServerError, match=r"environment .* has not answered"):
        collected.collect([typed_row(0)], server_timeout=0.1)
    assert collected.events[-1]["unresolved"] == 1
    assert collected.events[-1]["exit_code"] == 5
    collected.network.faults.clear()
    assert collected.restore().counts.succeeded == 1


def test_an_attempt_is_in_the_journal_before_its_request_leaves(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    known: list[bool] = []

    async def looking(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        journal = b"".join(path.read_bytes() for path in (directory / "journal").glob("dispatch-*"))
        known.append(body["episode_id"]["rollout_id"].encode() in journal)
        return await judged(body)

    collected, _ = plain(directory, looking)
    collected.collect(rows([typed_row(n) for n in range(20)]))
    assert known == [True] * 20


def test_an_agent_at_its_limit_holds_nobody_else_up(tmp_path: Path) -> None:
    release = asyncio.Event()
    seen: list[str] = []

    async def answer(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        agent = body["agent_ref"]["name"]
        seen.append(agent)
        if agent == "slow":
            await release.wait()
        elif seen.count("quick") == 6:
            release.set()
        return await judged(body)

    collected, _ = plain(tmp_path / "run", answer)
    items = [
        {"responses_create_params": {"input": "?"}, "agent_ref": {"name": name}}
        for name in ["slow"] * 6 + ["quick"] * 6
    ]
    routes = {"slow": "environment", "quick": "environment"}
    summary = collected.collect(items, concurrency=4, agent_concurrency={"slow": 1}, routes=routes)
    assert summary.counts.succeeded == 12
    assert seen[:7].count("slow") == 1


def test_an_outage_never_uses_up_attempts(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run")
    collected.network.faults += [
        Fault("lost_reply", "environment", "/run", times=3),
        Fault("refused", "environment", "/", times=1),
    ]
    summary = collected.collect([typed_row(0)], max_attempts=3, concurrency=1)
    assert summary.counts.succeeded == 1
    assert attempts(environment.bodies) == [0, 1, 2, 3]
    assert [row["_ng_attempt_index"] for row in collected.lines("failures.jsonl")] == [1, 2]
