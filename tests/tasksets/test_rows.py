"""What every bundled task set promises."""

import hashlib
from typing import Any

import pytest

from gymckpt import jsoncodec
from gymckpt.errors import UsageError
from gymckpt.identity import is_safe_name
from gymckpt.tasksets import TASKSETS, task_rows
from gymckpt.wire.gym import Task

SIZES = {"workbench": 200, "answers": 60, "judged": 40, "shell": 40, "mixed": 100, "math": 30, "pairwise": 40}


@pytest.mark.parametrize("name", TASKSETS)
def test_a_task_set_has_its_size_and_unique_safe_ids(name: str) -> None:
    ids = [(row["task_id"]["taskset"], row["task_id"]["task_id"]) for row in task_rows(name)]
    assert len(ids) == len(set(ids)) == SIZES[name]
    assert all(is_safe_name(task_id) and taskset in SIZES for taskset, task_id in ids)


@pytest.mark.parametrize("name", TASKSETS)
def test_rows_are_typed_and_carry_a_seed(name: str) -> None:
    for row in task_rows(f"@{name}"):
        task = Task.model_validate(row)
        assert task.task_input.responses_create_params["metadata"]["seed"] == task.task_id.task_id
        assert set(row) == {"task_id", "task_input"}


def test_rows_are_the_same_in_every_version_until_somebody_means_to_change_them() -> None:
    digest = hashlib.sha256()
    for name in SIZES:
        for row in task_rows(name):
            digest.update(jsoncodec.canonical(row))
    assert digest.hexdigest()[:16] == "e0ad4690df46a439"


def test_mixed_needs_every_kind_of_server() -> None:
    kinds = [row["task_id"]["taskset"] for row in task_rows("mixed")]
    assert {kind: kinds.count(kind) for kind in kinds} == {"workbench": 40, "answers": 20, "judged": 20, "shell": 20}


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no bundled task set '@nonsense'") as caught:
        task_rows("@nonsense")
    assert "@workbench" in (caught.value.hint or "")


def _tools(row: dict[str, Any]) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = row["task_input"]["responses_create_params"].get("tools", [])
    return tools


def test_tools_have_strict_schemas() -> None:
    for name in ("workbench", "shell"):
        for tool in _tools(next(task_rows(name))):
            parameters = tool["parameters"]
            assert tool["strict"] is True
            assert parameters["additionalProperties"] is False
            assert parameters["required"] == list(parameters["properties"])
    assert len(_tools(next(task_rows("workbench")))) >= 12


def test_a_prompt_of_pairwise_has_as_many_members_as_its_rows_say() -> None:
    prompts = [jsoncodec.dumps(row["task_input"]["responses_create_params"]["input"]) for row in task_rows("pairwise")]
    for row, prompt in zip(task_rows("pairwise"), prompts, strict=True):
        assert prompts.count(prompt) == row["task_input"]["task_data"]["cohort_size"]
