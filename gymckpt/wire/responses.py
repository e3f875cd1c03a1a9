"""The little of the Responses and Chat Completions shapes that we look into; everything else passes through untouched.

A request is read as a conversation of Responses items: messages, `function_call`, `function_call_output`, `reasoning`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from gymckpt import jsoncodec

Json = dict[str, Any]
Route = Literal["/v1/responses", "/v1/chat/completions"]

RESPONSES: Final[Route] = "/v1/responses"
CHAT: Final[Route] = "/v1/chat/completions"
ROUTES: Final[tuple[Route, ...]] = (RESPONSES, CHAT)

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "extra_body")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a reply says it took."""

    prompt_tokens: int = 0
    output_tokens: int = 0


def conversation(route: Route, body: Mapping[str, Any]) -> list[Json]:
    """The request's conversation as Responses items; chat messages are translated, what is unreadable is left out."""
    if route == CHAT:
        return [item for message in _objects(body.get("messages")) for item in _from_message(message)]
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _objects(given)
    if isinstance(body.get("instructions"), str):
        return [{"role": "system", "content": body["instructions"]}, *items]
    return items


def tools(body: Mapping[str, Any]) -> list[Json]:
    """The tools on offer, each flat as in the Responses API (`name`, `parameters`)."""
    found = []
    for tool in _objects(body.get("tools")):
        inner = tool.get("function")
        found.append({"type": "function", **inner} if isinstance(inner, dict) else tool)
    return found


def seed(body: Mapping[str, Any]) -> str:
    """`metadata.seed`, or the empty string."""
    metadata = body.get("metadata")
    value = metadata.get("seed", "") if isinstance(metadata, dict) else ""
    return value if isinstance(value, str) else str(value)


def output_limit(body: Mapping[str, Any]) -> int | None:
    """The largest number of tokens the reply may have, where the request says so."""
    for name in ("max_output_tokens", "max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def request_digest(route: Route, body: Mapping[str, Any]) -> str:
    """SHA-256 over route and body, whatever the order of keys. How the reply is sent back (`stream`) and the name of
    the model, which the server sets, do not count."""
    counted = {name: value for name, value in body.items() if name not in ("stream", "stream_options", "model")}
    return digest({"route": route, "body": counted})


def digest(value: Any) -> str:
    """SHA-256, in hex, over canonical JSON."""
    return hashlib.sha256(jsoncodec.canonical(value)).hexdigest()


def is_constrained(body: Mapping[str, Any]) -> bool:
    """Whether decoding is constrained, so that a prefix cannot simply be continued."""
    if body.get("tool_choice") not in (None, "auto", "none"):
        return True
    if any(body.get(name) is not None for name in _GUIDED):
        return True
    text = body.get("text")
    wanted = text.get("format") if isinstance(text, dict) else None
    formats = [wanted, body.get("response_format")]
    return any(f is not None and (not isinstance(f, dict) or f.get("type") != "text") for f in formats)


def wants_stream(body: Mapping[str, Any]) -> bool:
    """Only a genuine `true` asks for server-sent events."""
    return body.get("stream") is True


def output_items(route: Route, reply: Mapping[str, Any]) -> list[Json]:
    """What the model said, as Responses items."""
    if route == RESPONSES:
        return _objects(reply.get("output"))
    return [
        item
        for choice in _objects(reply.get("choices"))
        if isinstance(choice.get("message"), dict)
        for item in _from_message(choice["message"])
    ]


def usage(reply: Mapping[str, Any]) -> Usage:
    """The token counts in a reply of either API; 0 where it says nothing."""
    said = reply.get("usage")
    if not isinstance(said, dict):
        return Usage()
    return Usage(
        _count(said.get("input_tokens", said.get("prompt_tokens"))),
        _count(said.get("output_tokens", said.get("completion_tokens"))),
    )


def item_ids(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids of the items that a model made: of items and of calls, in order, each once."""
    found: dict[str, None] = {}
    for item in items:
        if is_model_made(item):
            for name in ("id", "call_id"):
                if isinstance(item.get(name), str) and item[name]:
                    found[item[name]] = None
    return list(found)


def is_model_made(item: Mapping[str, Any]) -> bool:
    """Whether the item is something a model said: an assistant message, a call, reasoning."""
    kind = item.get("type", "message")
    return kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant")


def content_digest(item: Mapping[str, Any]) -> str:
    """What a model-made item says, without ids: the same before and after an agent has passed it on."""
    if item.get("type") == "function_call":
        return digest(["function_call", item.get("name"), item.get("arguments")])
    return digest([item.get("type", "message"), text_of(item)])


def text_of(item: Mapping[str, Any]) -> str:
    """The text of a message or reasoning item, its parts joined."""
    content = item.get("content", item.get("summary"))
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in _objects(content))


def _from_message(message: Json) -> list[Json]:
    role = message.get("role")
    content = message.get("content")
    if role == "tool":
        return [{"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": content}]
    items: list[Json] = []
    if role == "assistant" and isinstance(message.get("reasoning_content"), str):
        thought = [{"type": "summary_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "summary": thought})
    if content or role != "assistant":
        items.append({"type": "message", "role": role, "content": content})
    for call in _objects(message.get("tool_calls")):
        function = call.get("function")
        if isinstance(function, dict):
            items.append(
                {
                    "type": "function_call",
                    "call_id": call.get("id"),
                    "name": function.get("name"),
                    "arguments": function.get("arguments"),
                }
            )
    return items


def _objects(value: Any) -> list[Json]:
    return [cast(Json, item) for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
