"""What a tool takes, as JSON Schema: for protocols that list tools."""

import inspect
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from pydantic import ConfigDict, create_model
from pydantic.errors import PydanticUserError


@dataclass(frozen=True, slots=True)
class ToolDescription:
    """A tool as a model sees it."""

    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object"})
    """JSON Schema of the arguments."""


def describe(tool: Any) -> ToolDescription:
    """From the docstring and the signature of `async def tool(call, *, ...)`, whose first parameter is ours.

    Where the annotations have no JSON Schema, any object is said to fit.
    """
    parameters = list(inspect.signature(tool).parameters.values())[1:]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    description = inspect.getdoc(tool) or ""
    try:
        hints = get_type_hints(tool)
        fields: dict[str, Any] = {
            p.name: (hints.get(p.name, Any), ... if p.default is inspect.Parameter.empty else p.default) for p in named
        }
        model = create_model("Arguments", __config__=ConfigDict(extra="allow" if takes_any else "forbid"), **fields)
        return ToolDescription(description, model.model_json_schema())
    except (PydanticUserError, NameError):
        return ToolDescription(description)
