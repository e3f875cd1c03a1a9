"""Reading the text of a model's last answer."""

from typing import Any


def last_text(response: dict[str, Any]) -> str:
    """The text of the last assistant message of a Responses API response; empty if it says nothing."""
    output = response.get("output")
    for item in reversed(output if isinstance(output, list) else []):
        if isinstance(item, dict) and item.get("type") == "message" and item.get("role", "assistant") == "assistant":
            return _joined(item.get("content"))
    return ""


def boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}`, braces balanced; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def _joined(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (part.get("text") for part in content if isinstance(part, dict))
    return "".join(text for text in parts if isinstance(text, str))
