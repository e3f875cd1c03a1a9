"""What the scripted policy says next: tool calls, or a last word."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call. `arguments` is a JSON object in the order in which it is to be written."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """One turn of the model. With `calls`, `text` is said before them and may be empty; without, it is the answer."""

    calls: tuple[ToolCall, ...] = ()
    text: str = ""

    @property
    def final(self) -> bool:
        """Whether the model is done: a turn without calls."""
        return not self.calls
