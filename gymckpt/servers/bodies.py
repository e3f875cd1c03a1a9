"""JSON in and out of a data-plane route, bounded, with large bodies off the event loop; and the shape of errors."""

from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import GymckptError, UsageError
from gymckpt.ports import Offload
from gymckpt.roles.failures import EpisodeFailed
from gymckpt.roles.neighbours import NeighbourFailed

MAX_BODY_BYTES = 256 << 20
OFFLOADED_BYTES = 256 << 10

M = TypeVar("M", bound=BaseModel)


class BodyTooLarge(UsageError):
    """A request's body is beyond every bound."""

    code = "request_too_large"
    http_status = 413


class BadBody(UsageError):
    """A request's body is not what the route takes."""

    code = "invalid_request"
    http_status = 422


async def read_bytes(request: Request) -> bytes:
    """What a request carries; raises `BodyTooLarge`."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(data)


async def read_object(request: Request, offload: Offload) -> dict[str, Any]:
    """The JSON object that a request carries; raises `BadBody`, `BodyTooLarge`."""
    data = await read_bytes(request)
    try:
        large = len(data) > OFFLOADED_BYTES
        value = await offload.run(lambda: jsoncodec.loads(data)) if large else jsoncodec.loads(data)
    except ValueError as error:
        raise BadBody(f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadBody("the body is not a JSON object")
    return value


def checked(model: type[M], body: dict[str, Any]) -> M:
    """`body` as `model`; raises `BadBody` naming the field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadBody(f"{'.'.join(str(part) for part in first['loc'])[:200]}: {first['msg'][:300]}") from error


async def json_response(
    value: Any, offload: Offload, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A reply. Its size is not known beforehand, so it is always written off the event loop."""
    content = await offload.run(lambda: jsoncodec.dumps(value))
    return Response(content, status_code=status, headers=headers, media_type="application/json")


def error_json(error: GymckptError) -> dict[str, Any]:
    """`{"error": {"code", "detail"}}`; for failures also what accounting wants to know."""
    body: dict[str, Any] = {"error": {"code": error.code, "detail": error.detail}}
    match error:
        case EpisodeFailed():
            body["error"]["code"] = error.kind
            body["terminal"] = error.terminal
            body["failure"] = error.as_json()
        case NeighbourFailed():
            body["error"]["code"] = error.kind
            body["terminal"] = error.terminal
        case _:
            pass
    return body


async def refuse(_: Request, error: Exception) -> Response:
    """Exception handler for `GymckptError`."""
    assert isinstance(error, GymckptError)
    return Response(jsoncodec.dumps(error_json(error)), error.http_status, media_type="application/json")
