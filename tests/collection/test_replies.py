"""What an answer to `/run` means."""

from typing import Any

import pytest

from gymckpt import jsoncodec
from gymckpt.collection.replies import BUSY_S, OUTAGES, Failed, NotStarted, Succeeded, Superseded, judge, judge_error
from gymckpt.errors import DeadlinePassed, NotSent, ServerError
from gymckpt.identity import EpisodeId
from gymckpt.ports import Reply

EPISODE = EpisodeId("abcd1234-0-0", 1)
TYPED = {
    "episode_id": {"rollout_id": "abcd1234-0-0", "attempt": 1},
    "task_id": {"taskset": "t", "task_id": "1"},
}


def answer(body: Any, status: int = 200, **headers: str) -> Any:
    data = body if isinstance(body, bytes) else jsoncodec.dumps(body)
    return judge(Reply(status, {name.replace("_", "-"): value for name, value in headers.items()}, data), EPISODE, 1e9)


def test_a_typed_request_may_be_answered_typed_or_flat() -> None:
    assert answer({**TYPED, "result": {"reward": 0.5, "x": 1}}) == Succeeded({"reward": 0.5, "x": 1}, 0.5)
    assert answer({"reward": 1, "response": {}}) == Succeeded({"reward": 1, "response": {}}, 1.0)


def test_a_typed_failure_keeps_its_kind_stage_and_whether_it_is_terminal() -> None:
    failure = {"failure_reason": "no", "terminal": True, "failure_kind": "seed", "stage": "seed"}
    assert answer({**TYPED, "failure": failure}) == Failed("seed", "no", "seed", terminal=True)


def test_a_reply_for_another_episode_is_no_result() -> None:
    other = {**TYPED, "episode_id": {"rollout_id": "abcd1234-0-0", "attempt": 0}, "result": {"reward": 1.0}}
    assert isinstance(answer(other), Failed)


@pytest.mark.parametrize("reward", [b'{"reward":NaN}', {"reward": None}, {}, {"reward": "1"}, {"reward": True}])
def test_what_is_no_finite_number_is_no_reward_and_never_zero(reward: Any) -> None:
    verdict = answer(reward)
    assert isinstance(verdict, Failed)
    assert verdict.kind in ("no_reward", "bad_reply")


def test_a_failure_of_the_machinery_is_never_a_reward_of_zero() -> None:
    flat = {"reward": 0.0, "mask_sample": True, "failure_kind": "judge_down", "failure_reason": "503"}
    assert answer(flat) == Failed("judge_down", "503")


@pytest.mark.parametrize("code", ["checkpoint_parked", "admission_closed"])
def test_a_refusal_before_any_work_means_the_same_attempt_again(code: str) -> None:
    assert answer({"error": {"code": code, "detail": ""}}, 409) == NotStarted(closed=True)


def test_a_stale_attempt_is_no_failure_of_the_rollout() -> None:
    assert isinstance(answer({"error": {"code": "stale_attempt", "detail": "retired"}}, 409), Superseded)


def through_gym(inner: bytes, *servers: str) -> bytes:
    """What the outermost of Gym's servers answers when the innermost was answered `inner`."""
    for server in servers:
        inner = jsoncodec.dumps(f"Hit an exception in {server} calling an inner server: {inner!r}")
    return inner


@pytest.mark.parametrize("code", ["checkpoint_parked", "admission_closed", "stale_attempt"])
@pytest.mark.parametrize("servers", [("Agent___agent",), ("Agent___agent", "Environment___environment")])
def test_a_refusal_that_servers_in_between_have_turned_into_a_failure_is_none_of_the_rollout(
    code: str, servers: tuple[str, ...]
) -> None:
    refused = jsoncodec.dumps({"error": {"code": code, "detail": 'closed for "x"'}})
    failure = {"failure_reason": "closed", "failure_kind": code, "stage": "agent"}
    verdicts = [
        answer(through_gym(refused, *servers), 500),
        answer({"error": {"code": code, "detail": "closed"}}, 502),
        answer({**TYPED, "failure": failure}),
    ]
    for verdict in verdicts:
        if code == "stale_attempt":
            assert isinstance(verdict, Superseded)
        else:
            assert isinstance(verdict, Failed)
            assert verdict.kind in OUTAGES
            assert not verdict.terminal


def test_a_failure_that_only_speaks_of_a_refusal_stays_the_rollouts() -> None:
    assert answer('the model wrote "admission_closed"', 500) == Failed("http_500", 'the model wrote "admission_closed"')


def test_retry_after_is_obeyed_in_seconds_and_as_a_date() -> None:
    assert answer({}, 503, retry_after="7") == NotStarted(after_s=7.0)
    assert answer({}, 429) == NotStarted(after_s=BUSY_S)
    dated = answer({}, 429, retry_after="Sun, 09 Sep 2001 01:46:50 GMT")
    assert dated == NotStarted(after_s=10.0)
    assert answer({}, 429, retry_after="soon") == NotStarted(after_s=BUSY_S)


def test_a_server_error_is_a_failure_and_an_unreadable_request_a_terminal_one() -> None:
    assert answer("boom", 500) == Failed("http_500", "boom")
    assert answer({"detail": []}, 422) == Failed("http_422", '{"detail":[]}', terminal=True)
    assert answer({}, 503) == Failed("http_503", "{}")
    assert answer({"error": {"code": "unknown_session", "detail": "gone"}}, 409) == Failed("unknown_session", "gone")


def test_only_a_refused_connection_proves_that_nothing_was_begun() -> None:
    assert judge_error(NotSent("refused")) == NotStarted(unreachable=True)
    for error in (ServerError("broke"), DeadlinePassed("late")):
        verdict = judge_error(error)
        assert isinstance(verdict, Failed)
        assert verdict.unknown


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'"text"', b"\xff"])
def test_a_reply_that_is_no_object_is_a_failure_and_not_a_crash(body: bytes) -> None:
    assert isinstance(answer(body), Failed)
    assert isinstance(answer(body, 500), Failed)
