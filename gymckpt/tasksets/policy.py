"""The scripted policy: a deterministic function of the conversation and a seed."""

from typing import Any

from gymckpt.tasksets import answers, errands, judged, mathematics, pairwise, shell
from gymckpt.tasksets.conversation import Conversation
from gymckpt.tasksets.decision import Decision, ToolCall

_MAX_SAMPLE_DEPTH = 8


def decide(input_items: list[dict[str, Any]], tools: list[dict[str, Any]], seed: str) -> Decision:
    """The next turn of the conversation `input_items` (items of the Responses API: messages, function_call,
    function_call_output, reasoning) with `tools` on offer.

    Pure: the same texts, calls, outputs, tools and seed give the same decision. Ids of items and calls only pair calls
    with outputs. A conversation about none of the bundled task sets gets a plain answer, after one call of the first
    tool if there is one.
    """
    talk = Conversation.read(input_items)
    names = {tool.get("name") for tool in tools}
    decision = judged.judge(talk.request) or pairwise.judge(talk.request)
    if decision is None and "find_customer" in names:
        decision = errands.work(talk.request, talk.outputs, seed)
    if decision is None and shell.TOOL in names:
        decision = shell.work(talk.request, len(talk.outputs), seed)
    if decision is None and not names:
        answerers = (answers.answer, judged.answer, mathematics.answer, pairwise.answer)
        decision = next((said for answer in answerers if (said := answer(talk.request, seed))), None)
    return decision or _plain(talk, tools)


def _plain(talk: Conversation, tools: list[dict[str, Any]]) -> Decision:
    first = next((tool for tool in tools if isinstance(tool.get("name"), str)), None)
    if first is not None and not talk.outputs:
        arguments = sample(first.get("parameters") or {})
        return Decision((ToolCall(first["name"], arguments if isinstance(arguments, dict) else {}),))
    words = len(talk.request.split())
    return Decision(text=f"I have read {words} words and used {len(talk.outputs)} tool outputs. That is all.")


def sample(schema: dict[str, Any], depth: int = 0) -> Any:
    """A small value that fits a JSON schema of the kind tools have; None where the schema says nothing."""
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key) and depth < _MAX_SAMPLE_DEPTH:
            return sample(schema[key][0], depth + 1)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object" if depth < _MAX_SAMPLE_DEPTH:
            properties = schema.get("properties") or {}
            return {name: sample(properties.get(name) or {}, depth + 1) for name in schema.get("required") or ()}
        case "array":
            items = schema.get("items") or {}
            return [sample(items, depth + 1) for _ in range(min(int(schema.get("minItems") or 0), 16))]
        case "string":
            return "sample".ljust(int(schema.get("minLength") or 0), ".")
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
    return {} if "properties" in schema else None
