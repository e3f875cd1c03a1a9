"""The scripted policy away from the workbench, and its being a function of conversation and seed alone."""

from typing import Any

import pytest

from gymckpt.tasksets import task_rows
from gymckpt.tasksets.decision import Decision, ToolCall
from gymckpt.tasksets.judged import DIFFERENT, SAME, judge_prompt, verdict_of
from gymckpt.tasksets.policy import decide, sample


def ask(text: str, seed: str = "") -> Decision:
    return decide([{"role": "user", "content": text}], [], seed)


def conversation(row: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    """The first round of a task, with ids that begin with `prefix`."""
    parameters = row["task_input"]["responses_create_params"]
    first = decide(parameters["input"], parameters["tools"], "s")
    items = list(parameters["input"])
    for number, call in enumerate(first.calls):
        ids = {"id": f"{prefix}-{number}", "call_id": f"{prefix}-call-{number}"}
        items.append({"type": "function_call", "name": call.name, "arguments": "{}", **ids})
    for number, _ in enumerate(first.calls):
        items.append({"type": "function_call_output", "call_id": f"{prefix}-call-{number}", "output": "{}"})
    return items


@pytest.mark.parametrize("name", ["workbench", "shell"])
def test_ids_do_not_influence_a_decision(name: str) -> None:
    for row in list(task_rows(name))[:20]:
        tools = row["task_input"]["responses_create_params"]["tools"]
        assert decide(conversation(row, "x"), tools, "s") == decide(conversation(row, "other"), tools, "s")


def test_content_in_parts_reads_like_plain_text() -> None:
    row = next(task_rows("answers"))
    text = row["task_input"]["responses_create_params"]["input"][0]["content"]
    parts = [{"type": "input_text", "text": text[:9]}, {"type": "input_text", "text": text[9:]}]
    assert decide([{"type": "message", "role": "user", "content": parts}], [], "s") == ask(text, "s")


def test_another_seed_sometimes_gives_another_answer() -> None:
    text = "What is 12 * 12 + 100? Put the result into \\boxed{}."
    assert len({ask(text, str(seed)).text for seed in range(40)}) == 2


def test_the_judge_finds_the_reference_in_the_answer() -> None:
    same = judge_prompt("What?", "It is a list.", "Well: it is a LIST, of course.")
    other = judge_prompt("What?", "It is a list.", "It is a book. </answer> It is a\n")
    assert verdict_of(ask(same).text) is True
    assert verdict_of(ask(other).text) is False


def test_the_last_verdict_counts_and_none_is_none() -> None:
    assert verdict_of(f"{SAME} or rather {DIFFERENT}") is False
    assert verdict_of("I cannot say.") is None


def test_an_unknown_conversation_uses_the_first_tool_once_and_ends() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"], "minimum": 3}},
        "required": ["city", "days"],
    }
    tools = [{"type": "function", "name": "weather", "parameters": schema}]
    user = {"role": "user", "content": "How is it there?"}
    first = decide([user], tools, "s")
    assert first == Decision((ToolCall("weather", {"city": "sample", "days": 3}),))
    called = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    answered = {"type": "function_call_output", "call_id": "c", "output": "fine"}
    assert decide([user, called, answered], tools, "s").final


def test_an_empty_conversation_gets_an_answer() -> None:
    assert decide([], [], "").final


def test_a_recursive_schema_ends() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {}, "required": ["next"]}
    schema["properties"]["next"] = schema
    assert isinstance(sample(schema), dict)
