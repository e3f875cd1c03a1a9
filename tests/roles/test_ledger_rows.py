"""Which earlier call a call follows, and what a row says."""

from typing import Any

import pytest

from gymckpt.roles.ledger_rows import CallFacts, Lineage, Row, make_row, next_index, repeated, resolve, row_problem

ROOT = Lineage("root")
UNRESOLVED = Lineage("unresolved")


def said(text: str, number: int, **item: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": content, **item}


def row(
    call: str, output: list[dict[str, Any]], *, key: str = "r-1", digest: str = "d", lineage: Lineage = ROOT
) -> Row:
    facts = CallFacts(call, int(call), key, lineage, digest, 1.5)
    return make_row(facts, "/v1/responses", {"id": f"resp_{call}", "output": output}, policy_version="v", chain=())


USER = {"role": "user", "content": "go"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "nothing"}
ROWS = [row("0", [said("first", 0)]), row("1", [CALL]), row("2", [said("same", 2)]), row("3", [said("same", 3)])]


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        ([USER], ROOT),
        ([USER, said("first", 0)], Lineage("resolved", "0")),
        ([USER, said("first", 0), CALL, RESULT], Lineage("resolved", "1")),
        ([USER, {**CALL, "id": None, "call_id": None}, RESULT], Lineage("resolved", "1")),
        ([USER, {"role": "assistant", "content": "first"}], Lineage("resolved", "0")),
        ([USER, said("same", 3)], Lineage("resolved", "3")),
        ([USER, {"role": "assistant", "content": "same"}], UNRESOLVED),
        ([USER, said("never said", 9)], UNRESOLVED),
    ],
)
def test_the_last_thing_the_model_said_names_the_call_before(conversation: list[Any], expected: Lineage) -> None:
    assert resolve(ROWS, conversation) == expected


def test_a_previous_response_id_decides() -> None:
    assert resolve(ROWS, [USER], "resp_2") == Lineage("resolved", "2")
    assert resolve(ROWS, [USER], "resp_9") == UNRESOLVED


def test_an_example_in_the_task_is_no_earlier_call_but_an_answer_with_an_id_is_one_that_is_not_known_here() -> None:
    assert resolve([], [USER, {"role": "assistant", "content": "like this"}, USER]) == ROOT
    assert resolve([], [USER, said("first", 0), USER]) == UNRESOLVED


def test_only_a_restored_call_that_nothing_followed_is_repeated() -> None:
    restored = row("4", [said("a", 4)], digest="x")
    assert repeated([restored], "r-1-a1", "x") is restored
    assert repeated([restored], "r-1-a1", "y") is None
    assert repeated([restored], "r-1", "x") is None
    followed = [restored, row("5", [said("b", 5)], lineage=Lineage("resolved", "4"))]
    assert repeated(followed, "r-1-a1", "x") is None
    done = [restored, {**row("6", [said("c", 6)], key="r-1-a1", digest="x"), "repeats": "4"}]
    assert repeated(done, "r-1-a2", "x") is done[1]


def test_the_next_index_follows_the_highest() -> None:
    assert next_index([]) == 0
    assert next_index(ROWS) == 4
    assert next_index([{"call_id": "from elsewhere"}]) == 0


def test_a_row_without_a_call_id_is_none() -> None:
    assert row_problem(ROWS[0]) is None
    wrongs: list[Any] = [None, [], {}, {"call_id": 1}, {"call_id": ""}, {"call_id": "x" * 257}]
    for wrong in wrongs:
        assert row_problem(wrong)


def test_a_row_of_chat_and_of_something_unreadable() -> None:
    facts = CallFacts("c", 0, "r-1", ROOT, "d", 1.5)
    message = {"role": "assistant", "content": "hi", "tool_calls": [{"id": "call_7", "function": {"name": "f"}}]}
    reply = {"choices": [{"message": message}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    made = make_row(facts, "/v1/chat/completions", reply, policy_version="v", chain=("k",))
    assert (made["prompt_tokens"], made["output_tokens"], made["item_ids"]) == (3, 2, ["call_7"])
    assert made["staging_chain"] == ["k"]
    empty = make_row(
        facts, "/v1/responses", {"output": "?", "usage": {"input_tokens": "many"}}, policy_version="", chain=()
    )
    assert (empty["prompt_tokens"], empty["item_ids"]) == (0, [])
