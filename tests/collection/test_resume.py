"""Resume, identity and the directory: what has gone wrong in systems like this one, and cannot here."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gymckpt.collection.run import Counts
from gymckpt.collection.settings import CollectSettings, scope_of
from gymckpt.collection.signals import Wishes
from gymckpt.errors import DamagedState, NotAsAsked, StoppedResumable, UsageError
from tests.collection.deployments import Collected, PlainEnvironment, judged, plain, rows, typed_row

TASKS = [typed_row(n) for n in range(12)]


def stopped_after(collected: Collected, environment: PlainEnvironment, count: int, **settings: Any) -> None:
    """Begin a run and stop it once `count` rollouts were asked for."""
    wishes = Wishes()

    async def answer(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        if len(environment.bodies) > count:
            wishes.ask_to_stop()
            await asyncio.sleep(3600)
        return await judged(body)

    environment.answer = answer
    summary = collected.collect(TASKS, wishes=wishes, concurrency=2, grace=2.0, **settings)
    assert summary.exit_code == 75
    assert summary.counts.unresolved
    assert summary.resume_command == f"gymckpt restore {collected.directory}"
    environment.answer = judged


@pytest.fixture
def half_done(tmp_path: Path) -> tuple[Collected, PlainEnvironment]:
    collected, environment = plain(tmp_path / "run")
    stopped_after(collected, environment, 5)
    return collected, environment


def test_a_resume_runs_what_has_no_outcome_and_nothing_else(half_done: tuple[Collected, PlainEnvironment]) -> None:
    collected, environment = half_done
    done = {row["_ng_task_index"] for row in collected.lines("rollouts.jsonl")}
    assert done
    environment.bodies.clear()
    summary = collected.restore()
    assert (summary.exit_code, summary.counts) == (0, Counts(12, 12, 0, 0, 0))
    asked = {int(body["task"]["task_id"]["task_id"]) for body in environment.bodies}
    assert asked == set(range(12)) - done
    assert sorted(row["_ng_task_index"] for row in collected.lines("rollouts.jsonl")) == list(range(12))


def test_work_cut_short_by_a_signal_writes_no_outcome(half_done: tuple[Collected, PlainEnvironment]) -> None:
    collected, _ = half_done
    assert collected.lines("failures.jsonl") == []
    assert {event["outcome"] for event in collected.events if event["event"] == "outcome"} == {"succeeded"}


def test_an_attempt_that_was_cut_short_is_not_sent_again_under_its_number(
    half_done: tuple[Collected, PlainEnvironment],
) -> None:
    collected, environment = half_done
    done = {row["_ng_rollout_id"] for row in collected.lines("rollouts.jsonl")}
    begun = {body["episode_id"]["rollout_id"] for body in environment.bodies} - done
    environment.bodies.clear()
    collected.restore()
    again = {body["episode_id"]["rollout_id"]: body["episode_id"]["attempt"] for body in environment.bodies}
    assert begun
    assert all(again[rollout_id] == 1 for rollout_id in begun)


def test_a_finished_run_has_nothing_to_resume_and_says_so_with_exit_code_0(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run")
    collected.collect(TASKS)
    environment.bodies.clear()
    for _ in range(2):
        summary = collected.restore()
        assert (summary.exit_code, summary.nothing_to_resume) == (0, True)
    assert environment.bodies == []
    assert len(collected.lines("rollouts.jsonl")) == 12


def test_the_same_command_with_resume_begins_an_empty_directory_and_goes_on_with_a_run(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run")
    stopped_after(collected, environment, 3, resume=True)
    assert collected.collect(TASKS, resume=True).counts == Counts(12, 12, 0, 0, 0)


def test_an_existing_run_is_refused_without_resume_and_deleted_only_with_overwrite(
    half_done: tuple[Collected, PlainEnvironment],
) -> None:
    collected, _ = half_done
    before = collected.lines("rollouts.jsonl")
    with pytest.raises(NotAsAsked, match="already holds a run"):
        collected.collect(TASKS)
    assert collected.lines("rollouts.jsonl") == before
    summary = collected.collect(TASKS[:1], overwrite=True)
    assert summary.counts == Counts(1, 1, 0, 0, 0)
    assert len(collected.lines("rollouts.jsonl")) == 1


def test_a_directory_with_files_that_are_not_ours_is_left_alone(tmp_path: Path) -> None:
    collected, _ = plain(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("x")
    refused: tuple[dict[str, Any], ...] = ({}, {"overwrite": True}, {"resume": True})
    for settings in refused:
        with pytest.raises(UsageError, match=r"thesis\.txt"):
            collected.collect(TASKS, **settings)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_a_moved_directory_resumes(half_done: tuple[Collected, PlainEnvironment]) -> None:
    collected, _ = half_done
    moved = collected.directory.with_name("moved")
    collected.directory.rename(moved)
    collected.directory = moved
    assert collected.restore().counts.succeeded == 12


def test_an_interrupted_creation_was_never_a_run(tmp_path: Path) -> None:
    collected, _ = plain(tmp_path / "run")
    collected.collect(TASKS[:1])
    for name in ("run.json", "rollouts.jsonl", "failures.jsonl"):
        (tmp_path / "run" / name).unlink()
    for path in (tmp_path / "run" / "journal").glob("*"):
        path.unlink()
    with pytest.raises(UsageError, match="no run to restore"):
        collected.restore()
    assert collected.collect(TASKS[:2]).counts == Counts(2, 2, 0, 0, 0)


def test_a_run_that_lost_its_run_json_is_damage_and_nothing_is_touched(
    half_done: tuple[Collected, PlainEnvironment],
) -> None:
    collected, _ = half_done
    (collected.directory / "run.json").unlink()
    before = sorted(path.name for path in collected.directory.rglob("*"))
    asked: tuple[dict[str, Any], ...] = ({}, {"resume": True})
    for settings in asked:
        with pytest.raises(DamagedState, match=r"run\.json"):
            collected.collect(TASKS, **settings)
    with pytest.raises(DamagedState, match=r"run\.json"):
        collected.restore()
    assert sorted(path.name for path in collected.directory.rglob("*")) == before


def test_a_run_of_a_later_format_is_refused_with_a_clear_message(half_done: tuple[Collected, PlainEnvironment]) -> None:
    collected, _ = half_done
    path = collected.directory / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(NotAsAsked, match="format 99"):
        collected.restore()


def test_result_files_that_were_lost_or_changed_are_made_good_from_the_journal(
    half_done: tuple[Collected, PlainEnvironment],
) -> None:
    collected, _ = half_done
    rollouts = collected.directory / "rollouts.jsonl"
    good = rollouts.read_bytes()
    for damage in (b"", good[:-5], good[: len(good) // 2], good + b'{"half": '):
        rollouts.write_bytes(damage)
        stopped = Wishes()
        stopped.ask_to_stop()
        with pytest.raises(StoppedResumable):
            collected.restore(wishes=stopped)
    rollouts.unlink()
    collected.restore()
    rows_now = collected.lines("rollouts.jsonl")
    assert sorted(row["_ng_task_index"] for row in rows_now) == list(range(12))
    assert rollouts.read_bytes().startswith(good)


def test_a_torn_last_line_of_a_journal_is_cut_and_the_attempt_goes_out_again(
    half_done: tuple[Collected, PlainEnvironment],
) -> None:
    collected, _ = half_done
    path = next((collected.directory / "journal").glob("dispatch-*"))
    path.write_bytes(path.read_bytes() + b'{"seq":99,"synced":0,"ev')
    assert collected.restore().counts.succeeded == 12


def test_a_changed_bit_in_a_journal_is_damage_that_names_file_and_line(
    half_done: tuple[Collected, PlainEnvironment],
) -> None:
    collected, _ = half_done
    path = next((collected.directory / "journal").glob("dispatch-*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedState, match=rf"{path.name} line \d+"):
        collected.restore()


def test_two_collectors_on_one_directory_the_second_is_refused(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run")

    async def both() -> None:
        begun, refused = asyncio.Event(), asyncio.Event()

        async def answer(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
            begun.set()
            await refused.wait()
            return await judged(body)

        environment.answer = answer
        first = asyncio.create_task(collected.collecting(rows(TASKS)))
        await begun.wait()
        asked: tuple[dict[str, Any], ...] = ({"resume": True}, {"overwrite": True})
        for settings in asked:
            with pytest.raises(NotAsAsked, match="is held by"):
                await collected.collecting(rows(TASKS), **settings)
        refused.set()
        assert (await first).counts.succeeded == 12

    asyncio.run(both())


def test_a_collector_whose_run_was_taken_stops_itself_and_nothing_is_doubled(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run")

    async def both() -> None:
        begun, taken = asyncio.Event(), asyncio.Event()

        async def answer(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
            if not begun.is_set():
                begun.set()
                await taken.wait()
            return await judged(body)

        environment.answer = answer
        first = asyncio.create_task(collected.collecting(rows(TASKS), concurrency=1))
        await begun.wait()
        second = asyncio.create_task(collected.collecting(rows(TASKS), resume=True, steal_lock=True))
        assert (await second).counts == Counts(12, 12, 0, 0, 0)
        taken.set()
        with pytest.raises(NotAsAsked):
            await first

    asyncio.run(both())
    assert sorted(row["_ng_task_index"] for row in collected.lines("rollouts.jsonl")) == list(range(12))


CHANGED: dict[str, Any] = {
    "limit": 11,
    "shuffle": True,
    "seed": 9,
    "repeats": {"*": 2},
    "agent": "other",
    "routes": {"numbers": "environment"},
    "model": "other",
    "sampling": {"temperature": 0.1},
    "cohort": "n",
}
"""Another value for every identity setting but `tasks`, whose rows are changed instead."""


@pytest.mark.parametrize("name", sorted(n for n in CollectSettings.model_fields if scope_of(n) == "identity"))
def test_one_changed_identity_field_is_refused_by_name(
    half_done: tuple[Collected, PlainEnvironment], name: str
) -> None:
    collected, environment = half_done
    environment.bodies.clear()
    items, settings = (TASKS[:-1], {}) if name == "tasks" else (TASKS, {name: CHANGED[name]})
    with pytest.raises(NotAsAsked, match=rf"  {name}: the run has .*, now "):
        collected.collect(items, resume=True, **settings)
    assert environment.bodies == []


def test_an_accepted_change_goes_on_with_the_frozen_plan_and_is_accepted_for_good(
    half_done: tuple[Collected, PlainEnvironment],
) -> None:
    collected, _ = half_done
    with pytest.raises(UsageError, match="no such field"):
        collected.collect(TASKS, resume=True, accept_change=("modle",))
    stop = Wishes()
    stop.ask_to_stop()
    with pytest.raises(StoppedResumable):
        collected.collect(TASKS, resume=True, model="other", accept_change=("model",), wishes=stop)
    collected.collect(TASKS, resume=True, model="other", accept_change=("model",))
    with pytest.raises(NotAsAsked, match='model: the run has "other"'):
        collected.collect(TASKS, resume=True)


def test_a_change_to_accept_that_is_no_field_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run")
    with pytest.raises(UsageError, match="no such field"):
        collected.collect(TASKS, accept_change=("modle",))
    assert environment.bodies == []
    assert not (collected.directory / "run.json").exists()


def test_operational_settings_may_change_at_every_start(half_done: tuple[Collected, PlainEnvironment]) -> None:
    collected, _ = half_done
    settings: dict[str, Any] = {"concurrency": 1, "checkpoint_every": "off", "keep": 5, "max_attempts": 9, "grace": 1.0}
    assert all(scope_of(name) == "operational" for name in settings)
    assert collected.collect(TASKS, resume=True, **settings).counts.succeeded == 12


def test_a_plan_that_lost_a_byte_is_damage(half_done: tuple[Collected, PlainEnvironment]) -> None:
    collected, _ = half_done
    path = collected.directory / "plan.jsonl.zst"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(DamagedState, match=r"plan\.jsonl\.zst"):
        collected.restore()
    path.write_bytes(data)
    shutil.rmtree(collected.directory / "checkpoints")
    assert collected.restore().counts.succeeded == 12
