"""Golden messages: every message is read, written back equal, and refused where it must be."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import InvalidRolloutId
from gymckpt.identity import EpisodeId
from gymckpt.wire import control, gym

DATA = Path(__file__).parents[1] / "data"
CONTROL: dict[str, Any] = json.loads((DATA / "control_messages.json").read_text())
GYM: dict[str, Any] = json.loads((DATA / "gym_messages.json").read_text())
GOLDEN = [(control, name, body) for name, body in CONTROL.items()] + [(gym, name, body) for name, body in GYM.items()]
REQUESTS = [name for name in CONTROL if name.endswith("Request") or name == "Operation"]


def model(module: Any, name: str) -> type[BaseModel]:
    found: type[BaseModel] = getattr(module, name)
    assert issubclass(found, BaseModel)
    return found


@pytest.mark.parametrize(("module", "name", "body"), GOLDEN, ids=[name for _, name, _ in GOLDEN])
def test_a_golden_message_is_read_and_written_back_equal(module: Any, name: str, body: Any) -> None:
    message = model(module, name).model_validate(body)
    assert json.loads(message.model_dump_json(exclude_unset=True)) == body


def test_there_is_a_golden_message_for_every_message_of_the_control_plane() -> None:
    named = {
        name
        for name, value in vars(control).items()
        if isinstance(value, type) and issubclass(value, BaseModel) and value.__module__ == control.__name__
    }
    inner = {"Message", "Answer", "EpisodeRef", "Report", "ErrorBody"}
    assert named - inner == set(CONTROL)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_with_an_unknown_field_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="extra_forbidden"):
        model(control, name).model_validate({**CONTROL[name], "surprise": 1})


@pytest.mark.parametrize("name", [name for name in CONTROL if name.endswith("Reply") or name == "Status"])
def test_a_reply_may_say_more_than_we_know(name: str) -> None:
    model(control, name).model_validate({**CONTROL[name], "surprise": 1})


@pytest.mark.parametrize(
    "bad",
    [
        {"checkpoint_id": ""},
        {"checkpoint_id": "../up"},
        {"checkpoint_id": "a" * 129},
        {"checkpoint_id": "-first"},
        {"checkpoint_id": "line\n"},
        {"deadline_ts": float("nan")},
        {"deadline_ts": float("inf")},
        {"deadline_ts": "1800000000"},
        {"deadline_ts": True},
        {"checkpoint_id": 7},
    ],
)
def test_an_unsafe_id_or_a_deadline_that_is_no_moment_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        control.Operation.model_validate({**CONTROL["Operation"], **bad})


@pytest.mark.parametrize("bad", ["", "a/b", "..", "x" * 129, "r-1-a2", "r\n", "ü"])
def test_an_unsafe_rollout_id_is_refused_everywhere(bad: str) -> None:
    body = {**CONTROL["RetireRequest"], "episode_ids": [{"rollout_id": bad, "attempt": 0}]}
    # Its own refusal on the wire (400 invalid_rollout_id), except where the field's length already says no.
    with pytest.raises((InvalidRolloutId, ValidationError)):
        control.RetireRequest.model_validate(body)


@pytest.mark.parametrize("bad", [{"stop": 1}, {"stop": "yes"}, {"checkpoint_dir": 7}, {"episode_ids": "all"}])
def test_a_commit_takes_each_field_in_its_own_type_only(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        control.CommitRequest.model_validate_json(jsoncodec.dumps({**CONTROL["CommitRequest"], **bad}))


@pytest.mark.parametrize("attempt", [-1, 10**9 + 1, "1.5", "1", 1.0, True, None])
def test_an_attempt_that_is_no_count_is_refused(attempt: Any) -> None:
    with pytest.raises(ValidationError):
        control.EpisodeRef.model_validate({"rollout_id": "r", "attempt": attempt})


def test_a_flat_row_without_a_rollout_id_is_named_by_its_indexes() -> None:
    row = {"_ng_task_index": 3, "_ng_rollout_index": 1, "_ng_attempt_index": 2}
    assert gym.FlatIdentity.model_validate(row).episode == EpisodeId("3-1", 2)
    assert gym.FlatIdentity.model_validate({}).episode is None
    assert gym.FlatIdentity.model_validate({"_ng_rollout_id": "x-1-0"}).episode == EpisodeId("x-1-0")
