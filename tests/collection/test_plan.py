"""The plan: rows in both shapes, bad ones all at once, order, repeats, and the file that freezes them."""

import gzip
from pathlib import Path
from typing import Any

import pytest
import zstandard

from gymckpt import jsoncodec
from gymckpt.collection.inputs import Lines, TaskInput, task_input
from gymckpt.collection.plan import Plan, write_plan
from gymckpt.collection.planfile import PlanReader
from gymckpt.collection.routing import Routing, Server
from gymckpt.collection.settings import CollectSettings
from gymckpt.errors import DamagedState, StoppedResumable, UsageError
from gymckpt.identity import TaskId
from gymckpt.ports import ServerRef
from gymckpt.storage.files import LocalFileSystem
from tests.collection.deployments import rows, typed_row

FS = LocalFileSystem()
ROUTING = Routing(
    (
        Server(ServerRef("environment", "http://e"), "environment"),
        Server(ServerRef("bound", "http://b"), agent="boxer"),
        Server(ServerRef("agent", "http://a"), "agent"),
    ),
)


def flat_row(number: int, **more: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": f"{number}?"}, "expected_answer": number, **more}


def planned(tmp_path: Path, source: TaskInput, **settings: Any) -> tuple[Plan, list[dict[str, Any]]]:
    path = tmp_path / "plan.jsonl.zst"
    plan = write_plan(FS, path, source, CollectSettings(tasks="x", **settings), ROUTING)
    reader = PlanReader(FS, path, plan.summary)
    return plan, [p.content() for frame in reader.frames for p in reader.read_frame(frame, lambda t, r: True)]


def refusal(tmp_path: Path, items: list[Any], **settings: Any) -> str:
    with pytest.raises(UsageError) as refused:
        planned(tmp_path, rows(items), **settings)
    return refused.value.detail


def test_every_planned_rollout_is_a_line_with_its_task_repeat_and_route(tmp_path: Path) -> None:
    plan, lines = planned(tmp_path, rows([typed_row(0), flat_row(1)]), repeats=2)
    assert [(line["task"], line["repeat"], line["owner"]) for line in lines] == [
        (0, 0, "environment"),
        (0, 1, "environment"),
        (1, 0, "agent"),
        (1, 1, "agent"),
    ]
    assert (plan.summary.rows, plan.summary.rollouts, plan.owners) == (2, 4, ("agent", "environment"))


def test_a_typed_row_goes_to_the_environment_that_runs_its_task_set() -> None:
    one = Server(ServerRef("one", "http://1"), "environment", tasksets=frozenset({"a"}))
    two = Server(ServerRef("two", "http://2"), "environment", tasksets=frozenset({"b"}))
    routing = Routing((one, two))
    assert [routing.typed(TaskId(taskset=name, task_id="0")) for name in ("a", "b")] == ["one", "two"]
    with pytest.raises(LookupError, match="task set 'c': 0 of 2"):
        routing.typed(TaskId(taskset="c", task_id="0"))


def test_zstd_tools_read_the_plan_and_pass_over_its_index(tmp_path: Path) -> None:
    planned(tmp_path, rows([typed_row(n) for n in range(3)]))
    with zstandard.ZstdDecompressor().stream_reader(
        (tmp_path / "plan.jsonl.zst").read_bytes(), read_across_frames=True
    ) as reader:
        assert len(reader.read().splitlines()) == 3


def test_a_flat_row_goes_to_the_environment_bound_to_its_agent_else_to_the_agent(tmp_path: Path) -> None:
    items = [flat_row(0, agent_ref={"name": "boxer"}), flat_row(1, agent_ref={"name": "agent"})]
    assert [line["owner"] for line in planned(tmp_path, rows(items))[1]] == ["bound", "agent"]


def test_all_bad_rows_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    items = [
        typed_row(0),
        b"{not json",
        b"[1]",
        {"question": 1},
        {"task_id": {"taskset": "t"}, "task_input": {"responses_create_params": {}}},
        {"task_id": {"taskset": "t", "task_id": "1"}, "task_input": {}},
        flat_row(1, agent_ref={"name": "nobody"}),
    ]
    told = refusal(tmp_path, items)
    assert "6 bad rows, nothing was sent" in told
    for line in range(2, 8):
        assert f"line {line}: " in told
    assert "line 1:" not in told


def test_a_repeated_explicit_id_is_refused_with_both_lines_and_1_is_the_same_as_its_text(tmp_path: Path) -> None:
    text, number = typed_row(1), typed_row(1)
    number["task_id"]["task_id"] = 1
    told = refusal(tmp_path, [typed_row(0), text, number])
    assert "line 3: the same task_id as line 2" in told


def test_equal_prompts_stay_separate_tasks(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path, rows([flat_row(1), flat_row(1), flat_row(1)]))
    assert plan.summary.rollouts == 3


def test_lines_are_split_at_newlines_only(tmp_path: Path) -> None:
    odd = flat_row(1, note="a\x85b\u2028c\u2029d\x0be\x0cf\x1cg\rh")
    raw = TaskInput("odd", lambda: [jsoncodec.dumps(odd) + b"\n\n" + jsoncodec.dumps(odd)])
    _, lines = planned(tmp_path, raw)
    assert [line["row"]["note"] for line in lines] == [odd["note"]] * 2


def test_a_line_that_two_chunks_share_is_one_line() -> None:
    lines = Lines([b'{"a"', b":1}\n{", b'"b":2}'])
    assert list(lines) == [(1, b'{"a":1}'), (2, b'{"b":2}')]


def test_ids_come_from_the_place_in_the_file_not_from_the_order_after_a_shuffle(tmp_path: Path) -> None:
    _, lines = planned(tmp_path, rows([typed_row(n) for n in range(20)]), shuffle=True, seed=3)
    assert [line["task"] for line in lines] != list(range(20))
    assert all(line["row"]["task_id"]["task_id"] == str(line["task"]) for line in lines)
    (tmp_path / "again").mkdir()
    again = planned(tmp_path / "again", rows([typed_row(n) for n in range(20)]), shuffle=True, seed=3)[1]
    assert again == lines


def test_a_limit_takes_the_first_tasks_yet_every_row_is_checked(tmp_path: Path) -> None:
    plan, lines = planned(tmp_path, rows([typed_row(n) for n in range(5)]), limit=2)
    assert [line["task"] for line in lines] == [0, 1]
    assert plan.summary.rows == 5
    (tmp_path / "bad").mkdir()
    assert "line 3" in refusal(tmp_path / "bad", [typed_row(0), typed_row(1), b"no"], limit=1)


def test_absurd_repeats_are_refused_before_anything_is_planned() -> None:
    with pytest.raises(ValueError, match="repeats"):
        CollectSettings(tasks="x", repeats={"*": 10**12})


def test_repeats_may_differ_by_agent(tmp_path: Path) -> None:
    items = [flat_row(0, agent_ref={"name": "boxer"}), flat_row(1, agent_ref={"name": "agent"})]
    _, lines = planned(tmp_path, rows(items), repeats="boxer=3,*=1")
    assert [(line["task"], line["repeat"]) for line in lines] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_repeats_of_an_agent_that_no_row_goes_to_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="repeats for nobody: no row goes to"):
        planned(tmp_path, rows([typed_row(0), flat_row(1)]), repeats="nobody=3,*=1")


def test_repeats_are_different_samples_where_a_seed_is_given(tmp_path: Path) -> None:
    _, lines = planned(tmp_path, rows([typed_row(7), flat_row(1)]), repeats=2)
    params = [line["row"]["task_input"]["responses_create_params"] for line in lines[:2]]
    assert [found["metadata"]["seed"] for found in params] == ["numbers/7", "numbers/7/1"]
    assert lines[2]["row"] == lines[3]["row"]


def test_overrides_are_laid_over_the_parameters_of_every_row(tmp_path: Path) -> None:
    _, lines = planned(tmp_path, rows([typed_row(0, temperature=1.0)]), sampling={"temperature": 0.5})
    assert lines[0]["row"]["task_input"]["responses_create_params"]["temperature"] == 0.5


def test_fields_of_a_row_that_nobody_knows_are_kept_and_a_collectors_own_are_dropped(tmp_path: Path) -> None:
    _, lines = planned(tmp_path, rows([flat_row(0, extra={"z": 1, "a": 2}, _ng_task_index=9)]))
    assert list(lines[0]["row"]["extra"]) == ["z", "a"]
    assert "_ng_task_index" not in lines[0]["row"]


def test_members_of_a_cohort_stand_side_by_side(tmp_path: Path) -> None:
    items = [flat_row(n, group=n % 2) for n in range(6)]
    plan, lines = planned(tmp_path, rows(items), cohort="group", repeats=2)
    assert [line["task"] for line in lines] == [0, 0, 2, 2, 4, 4, 1, 1, 3, 3, 5, 5]
    assert plan.largest_cohort == 6


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_compressed_files_are_read_as_what_they_hold(tmp_path: Path, suffix: str) -> None:
    halves = [b"".join(jsoncodec.dumps(typed_row(n)) + b"\n" for n in range(k, k + 300)) for k in (0, 300)]
    compress = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(suffix[6:], bytes)
    path = tmp_path / f"tasks{suffix}"
    path.write_bytes(compress(halves[0]) + compress(halves[1]))  # two parts, one after the other
    plan, lines = planned(tmp_path, task_input(str(path)))
    assert len(lines) == 600
    plainly = Lines([b"".join(halves)])
    list(plainly)
    assert plan.input_sha256 == plainly.sha256


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_short_is_refused(tmp_path: Path, suffix: str) -> None:
    compress = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    path = tmp_path / f"tasks.jsonl{suffix}"
    path.write_bytes(compress(jsoncodec.dumps(typed_row(0)) * 50)[:-9])
    with pytest.raises(UsageError, match=r"cut short|not readable"):
        planned(tmp_path, task_input(str(path)))


def test_an_empty_input_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    assert "no task rows" in refusal(tmp_path, [])
    with pytest.raises(UsageError, match="no task file"):
        task_input(str(tmp_path / "nothing.jsonl"))


def test_planning_stops_when_asked(tmp_path: Path) -> None:
    with pytest.raises(StoppedResumable):
        write_plan(FS, tmp_path / "p", rows([typed_row(0)]), CollectSettings(), ROUTING, lambda: True)


def test_a_plan_that_is_no_regular_file_is_damage(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path, rows([typed_row(0)]))
    path = tmp_path / "plan.jsonl.zst"
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(DamagedState, match="not a regular file"):
        PlanReader(FS, path, plan.summary)


def test_no_bit_of_the_plan_can_change_unnoticed(tmp_path: Path) -> None:
    plan, lines = planned(tmp_path, rows([typed_row(n) for n in range(2)]))
    path = tmp_path / "plan.jsonl.zst"
    good = path.read_bytes()

    def read() -> list[dict[str, Any]]:
        reader = PlanReader(FS, path, plan.summary)
        return [p.content() for frame in reader.frames for p in reader.read_frame(frame, lambda t, r: True)]

    frames_end = len(good) - plan.summary.index_bytes - 8
    for place in [*range(frames_end), *range(frames_end + 8, len(good))]:
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        try:
            assert read() == lines
        except DamagedState:
            continue
    for length in range(0, len(good), 7):
        path.write_bytes(good[:length])
        with pytest.raises(DamagedState):
            read()
