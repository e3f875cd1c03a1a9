"""A whole reply as server-sent events, for callers that asked for a stream.

The answer is complete before its first event: what a checkpoint holds back is then either undelivered or delivered,
never half of it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from gymckpt import jsoncodec
from gymckpt.wire.responses import CHAT, Route

KEEPALIVE = b": keep-alive\n\n"
"""A comment that keeps the connection open and says nothing."""
DELTA_CHARACTERS = 2_000


def events(route: Route, reply: Mapping[str, Any]) -> Iterator[bytes]:
    """The events of `reply`, in order, each ready to be sent; those of a failure where it is not of the API's shape."""
    if not (_is_chat(reply) if route == CHAT else _is_response(reply)):
        return failure(route, "server_error", "the answer is not of this API's shape")
    return _chat_events(reply) if route == CHAT else _responses_events(reply)


def _is_response(reply: Mapping[str, Any]) -> bool:
    output = reply.get("output")
    if not _are_objects(output):
        return False
    return all(_are_objects(item.get("content")) for item in output or () if item.get("type") == "message")


def _is_chat(reply: Mapping[str, Any]) -> bool:
    choices = reply.get("choices")
    if not _are_objects(choices):
        return False
    messages = [choice.get("message") or {} for choice in choices or ()]
    return _are_objects(messages) and all(_are_objects(message.get("tool_calls")) for message in messages)


def _are_objects(items: Any) -> bool:
    """Whether this is a list of objects, or nothing."""
    return items is None or (isinstance(items, list) and all(isinstance(item, dict) for item in items))


def failure(route: Route, code: str, message: str) -> Iterator[bytes]:
    """What ends a stream that was begun (by keep-alives) and has no answer."""
    error = {"code": code, "message": message}
    if route == CHAT:
        yield _event(None, {"error": error})
        yield b"data: [DONE]\n\n"
    else:
        response = {"object": "response", "status": "failed", "error": error, "output": []}
        yield _event("response.failed", {"type": "response.failed", "sequence_number": 0, "response": response})


def _responses_events(reply: Mapping[str, Any]) -> Iterator[bytes]:
    number = 0

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        data = _event(kind, {"type": kind, "sequence_number": number, **fields})
        number += 1
        return data

    begun = {**reply, "status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(reply.get("output") or []):
        where = {"output_index": index, "item_id": item.get("id")}
        yield event("response.output_item.added", output_index=index, item=_empty(item))
        if item.get("type") == "function_call":
            arguments = str(item.get("arguments") or "")
            for delta in _pieces(arguments):
                yield event("response.function_call_arguments.delta", **where, delta=delta)
            yield event("response.function_call_arguments.done", **where, arguments=arguments)
        elif item.get("type") == "message":
            for part_index, part in enumerate(item.get("content") or []):
                at = {**where, "content_index": part_index}
                text = str(part.get("text") or "")
                yield event("response.content_part.added", **at, part={**part, "text": ""})
                for delta in _pieces(text):
                    yield event("response.output_text.delta", **at, delta=delta)
                yield event("response.output_text.done", **at, text=text)
                yield event("response.content_part.done", **at, part=part)
        yield event("response.output_item.done", output_index=index, item=item)
    status = reply.get("status")
    last = status if status in ("incomplete", "failed") else "completed"
    yield event(f"response.{last}", response=reply)


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    begun = {**item, "status": "in_progress"}
    if item.get("type") == "function_call":
        begun["arguments"] = ""
    elif item.get("type") == "message":
        begun["content"] = []
    return begun


def _chat_events(reply: Mapping[str, Any]) -> Iterator[bytes]:
    common = {name: reply.get(name) for name in ("id", "created", "model")}
    head = {**common, "object": "chat.completion.chunk"}
    for choice in reply.get("choices") or []:
        index, message = choice.get("index", 0), choice.get("message") or {}

        def chunk(delta: dict[str, Any], finish: Any = None, index: int = index) -> bytes:
            return _event(None, {**head, "choices": [{"index": index, "delta": delta, "finish_reason": finish}]})

        yield chunk({"role": "assistant", "content": ""})
        for name, value in message.items():
            if name == "tool_calls":
                yield chunk({name: [{"index": n, **call} for n, call in enumerate(value or [])]})
            elif isinstance(value, str) and name != "role":
                for piece in _pieces(value):
                    yield chunk({name: piece})
        yield chunk({}, choice.get("finish_reason"))
    yield _event(None, {**head, "choices": [], "usage": reply.get("usage")})
    yield b"data: [DONE]\n\n"


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), DELTA_CHARACTERS):
        yield text[start : start + DELTA_CHARACTERS]


def _event(kind: str | None, data: Any) -> bytes:
    name = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    return name + b"data: " + jsoncodec.dumps(data) + b"\n\n"
