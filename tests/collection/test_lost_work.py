"""Work that systems like this one have lost, or called done: never sent, heard of too early, only in a file."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from gymckpt.collection import collector
from gymckpt.collection.run import Counts
from gymckpt.collection.rundirectory import RunPaths
from gymckpt.collection.settings import CollectSettings
from gymckpt.collection.signals import Wishes
from gymckpt.ports import SystemClock
from gymckpt.report.export import export_rows
from tests.collection.deployments import Collected, PlainEnvironment, judged, plain, rows, typed_row

TASKS = [typed_row(n) for n in range(12)]


def stopped_at_first_reply(tmp_path: Path) -> tuple[Collected, PlainEnvironment]:
    """A run of which two rollouts at a time were sent, and most never."""
    collected, environment = plain(tmp_path / "run")
    wishes = Wishes()

    async def answer(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        if len(environment.bodies) > 3:
            wishes.ask_to_stop()
            await asyncio.sleep(3600)
        return await judged(body)

    environment.answer = answer
    assert collected.collect(TASKS, wishes=wishes, concurrency=2, grace=2.0).exit_code == 75
    environment.answer = judged
    return collected, environment


def test_work_that_was_never_sent_is_unresolved_and_a_resume_runs_it(tmp_path: Path) -> None:
    collected, environment = stopped_at_first_reply(tmp_path)
    sent = {body["episode_id"]["rollout_id"] for body in environment.bodies}
    done = collected.events[-1]
    assert done["unresolved"] == 12 - done["succeeded"] > 12 - len(sent)
    assert collected.restore().counts == Counts(12, 12, 0, 0, 0)
    assert len({body["episode_id"]["rollout_id"] for body in environment.bodies}) == 12


def test_an_outcome_is_durable_before_anybody_hears_of_it(tmp_path: Path) -> None:
    collected, _ = plain(tmp_path / "run")
    unheard: list[str] = []

    def hear(event: Any) -> None:
        if event["event"] == "outcome":
            index = b"".join(path.read_bytes() for path in (tmp_path / "run" / "journal").glob("outcomes-*.index.*"))
            if event["rollout_id"].encode() not in index:
                unheard.append(event["rollout_id"])

    source = rows(TASKS)
    settings = CollectSettings(tasks=source.name)
    running = collector.collect(
        settings, collected.directory, collected.servers, collected.ports, on_event=hear, source=source
    )
    assert asyncio.run(running).exit_code == 0
    assert unheard == []


def test_a_row_in_a_result_file_proves_nothing_that_the_journal_does_not_say(tmp_path: Path) -> None:
    collected, environment = stopped_at_first_reply(tmp_path)
    results = collected.directory / "rollouts.jsonl"
    claimed = b"".join(b'{"reward": 1.0, "_ng_task_index": %d, "_ng_rollout_index": 0}\n' % task for task in range(12))
    results.write_bytes(results.read_bytes() + claimed)
    (collected.directory / "failures.jsonl").write_bytes(claimed)
    environment.bodies.clear()
    assert collected.restore().counts == Counts(12, 12, 0, 0, 0)
    assert environment.bodies
    assert sorted(row["_ng_task_index"] for row in collected.lines("rollouts.jsonl")) == list(range(12))
    assert collected.lines("failures.jsonl") == []


def test_values_that_json_tools_mangle_come_back_as_the_verifier_sent_them(tmp_path: Path) -> None:
    text = "lone \ud800, next line \x85, separator \u2028"
    reply = b'{"reward": 1.0, "response": {"text": "lone \\ud800, next line \\u0085, separator \\u2028", '
    reply += b'"seed": 18446744073709551617, "nothing": NaN, "much": -Infinity}}'

    async def answer(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        if len(environment.bodies) == 1:
            return 500, "down", {}
        return 200, reply, {}

    collected, environment = plain(tmp_path / "run", answer)
    assert collected.collect(TASKS[:2]).exit_code == 0
    assert collected.restore().nothing_to_resume

    async def exported() -> list[bytes]:
        ports = collected.ports
        paths = RunPaths(collected.directory)
        return [line async for line in export_rows(ports.fs, ports.offload, paths)]

    (collected.directory / "exported.jsonl").write_bytes(b"".join(asyncio.run(exported())))
    for name in ("rollouts.jsonl", "exported.jsonl"):
        found = collected.lines(name)
        assert len(found) == 2
        for row in found:
            response = row["response"]
            assert (response["text"], response["seed"]) == (text, 2**64 + 1)
            assert math.isnan(response["nothing"])
            assert response["much"] == float("-inf")


class Jumping(SystemClock):
    """A wall clock that is set by years, back and forth, each time it is read."""

    def __init__(self) -> None:
        self._reads = 0

    def time(self) -> float:
        self._reads += 1
        return 1_800_000_000.0 + (1e8 if self._reads % 2 else -1e8)


def test_jumps_of_the_wall_clock_change_nothing(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run")

    async def answer(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        if len(environment.bodies) % 5 == 1:
            return 429, "busy", {"retry-after": "0"}
        return await judged(body)

    environment.answer = answer
    seen: list[float] = []

    def watch(snapshot: Any) -> None:
        progress = snapshot()
        seen.extend([progress.elapsed_s, progress.rate_per_s])

    source = rows(TASKS)
    settings = CollectSettings(tasks=source.name, concurrency=2)
    ports = replace(collected.ports, clock=Jumping())
    running = collector.collect(
        settings, collected.directory, collected.servers, ports, on_progress=watch, source=source
    )
    summary = asyncio.run(running)
    assert (summary.exit_code, summary.counts.succeeded) == (0, 12)
    assert 0 <= summary.elapsed_s < 60
    assert all(0 <= value < 60 for value in seen)
