"""A conversation of the Responses API, as the scripted policy reads it."""

from dataclasses import dataclass
from typing import Any

from gymckpt import jsoncodec


@dataclass(frozen=True, slots=True)
class Conversation:
    """The last thing the user said, and the outputs of the calls made since, in the order of the calls."""

    request: str
    outputs: tuple[Any, ...]
    """JSON values (a text that is no JSON stays a text); None where a call has no output."""

    @classmethod
    def read(cls, input_items: list[dict[str, Any]]) -> "Conversation":
        """Ids of calls only pair them with their outputs."""
        request = ""
        calls: list[Any] = []
        outputs: dict[Any, Any] = {}
        for item in input_items:
            kind = item.get("type") or "message"
            if kind == "message" and item.get("role") == "user":
                request, calls = text_of(item.get("content")), []
            elif kind == "function_call":
                calls.append(item.get("call_id"))
            elif kind == "function_call_output":
                outputs[item.get("call_id")] = _value(item.get("output"))
        return cls(request, tuple(outputs.get(call_id) for call_id in calls))


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or the texts of its parts joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))


def _value(output: Any) -> Any:
    text = output if isinstance(output, str) else text_of(output)
    try:
        return jsoncodec.loads(text)
    except ValueError:
        return text
