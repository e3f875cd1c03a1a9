"""The control plane's routes on a FastAPI app: `mount` makes any server a participant in one line.

Bearer first (401), then the body (413 beyond 64 MiB, or 64 KiB where no list of episodes is taken; 422 for what is no
such message), then the operation; every refusal is `{"error": {"code", "detail"}}`. A `ControlError` that a role raises
on the app's own routes is answered the same way. Replies need a `Date` header, from which a controller reads the clock:
uvicorn sends it unless told not to.
"""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import ControlError, Unauthorized
from gymckpt.participant.participant import Participant
from gymckpt.participant.prefix import RolloutPrefix, error_body
from gymckpt.participant.role import Role
from gymckpt.ports import Clock, FileSystem, Offload, SystemClock, ThreadOffload
from gymckpt.settings import CheckpointSettings
from gymckpt.storage.files import LocalFileSystem
from gymckpt.wire.control import (
    PREFIX,
    CommitRequest,
    ForgetRequest,
    Operation,
    ProbeRequest,
    RestoreRequest,
    RetireRequest,
)

MAX_BODY_BYTES = 64 << 20
"""A scope of some hundred thousand episodes."""

MAX_PLAIN_BODY_BYTES = 64 << 10
"""A message without a list."""

MAX_INLINE_BODY_BYTES = 256 << 10
"""Larger bodies are parsed off the event loop."""

M = TypeVar("M", bound=BaseModel)


class BadBody(ControlError):
    """The body is not the message that the route takes."""

    code = "invalid_request"
    http_status = 422


class BodyTooLarge(ControlError):
    """The body is larger than any message of the control plane."""

    code = "request_too_large"
    http_status = 413


def mount(
    app: FastAPI,
    role: Role,
    settings: CheckpointSettings,
    *,
    clock: Clock | None = None,
    fs: FileSystem | None = None,
    offload: Offload | None = None,
    boot_id: str | None = None,
) -> Participant | None:
    """Make `app` a participant with `role`; None, and `app` untouched, where `settings` do not enable it.

    Adds the control routes, the answer for every `ControlError`, the rollout prefix in front of every route, and
    the end of the participant to the app's lifespan. Call it before the app serves.
    """
    if not settings.enabled:
        return None
    assert settings.control_auth_token is not None
    offload = offload or ThreadOffload()
    participant = Participant(
        role, settings, clock=clock or SystemClock(), fs=fs or LocalFileSystem(), offload=offload, boot_id=boot_id
    )
    _Routes(participant, settings.control_auth_token.get_secret_value(), offload).add_to(app)
    app.add_exception_handler(ControlError, _answer_for(participant))
    app.add_middleware(RolloutPrefix)
    _close_at_shutdown(app, participant)
    return participant


class _Routes:
    def __init__(self, participant: Participant, token: str, offload: Offload) -> None:
        self._participant = participant
        self._token = token.encode()
        self._offload = offload

    def add_to(self, app: FastAPI) -> None:
        app.add_api_route(f"{PREFIX}/status", self._status, methods=["GET"], include_in_schema=False)
        self._add(app, "prepare", Operation, self._participant.prepare)
        self._add(app, "renew", Operation, self._participant.renew)
        self._add(app, "commit", CommitRequest, self._participant.commit, MAX_BODY_BYTES)
        self._add(app, "restore", RestoreRequest, self._participant.restore, MAX_BODY_BYTES)
        self._add(app, "resume", Operation, self._participant.resume)
        self._add(app, "retire", RetireRequest, self._participant.retire, MAX_BODY_BYTES)
        self._add(app, "forget", ForgetRequest, self._participant.forget, MAX_BODY_BYTES)
        self._add(app, "probe", ProbeRequest, self._participant.probe)

    def _add(
        self,
        app: FastAPI,
        name: str,
        message: type[M],
        operation: Callable[[M], Awaitable[BaseModel]],
        limit_bytes: int = MAX_PLAIN_BODY_BYTES,
    ) -> None:
        async def endpoint(request: Request) -> Response:
            self._check_token(request)
            return _reply(await operation(await self._read(request, message, limit_bytes)))

        app.add_api_route(f"{PREFIX}/{name}", endpoint, methods=["POST"], include_in_schema=False, name=name)

    async def _status(self, request: Request) -> Response:
        self._check_token(request)
        return _reply(await self._participant.status())

    def _check_token(self, request: Request) -> None:
        check_bearer(request, self._token)

    async def _read(self, request: Request, message: type[M], limit_bytes: int) -> M:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit_bytes:
            raise BodyTooLarge(f"a body of {announced[:20]} bytes is larger than {limit_bytes}")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit_bytes:
                raise BodyTooLarge(f"the body is larger than {limit_bytes} bytes")
        try:
            if len(body) > MAX_INLINE_BODY_BYTES:
                return await self._offload.run(lambda: message.model_validate_json(bytes(body)))
            return message.model_validate_json(bytes(body))
        except ValidationError as error:
            raise bad_body(error) from error


def bad_body(error: ValidationError) -> BadBody:
    """The refusal of a body that is not the message that its route takes; names the field."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part)[:80] for part in first["loc"]) or "body"
    return BadBody(f"{where}: {first['msg'][:300]}")


def check_bearer(request: Request, token: bytes) -> None:
    """Raise `Unauthorized` unless `request` carries this control token."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("latin-1"), token)  # the bytes as they came
    if not same or scheme.lower() != "bearer":
        raise Unauthorized("the control plane needs its bearer token (checkpoint.control_auth_token)")


def _reply(message: BaseModel) -> Response:
    """Fields that were never set are fields of another kind of server, and are left out."""
    return Response(message.model_dump_json(exclude_unset=True), media_type="application/json")


def _answer_for(participant: Participant) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, ControlError)
        control = request.url.path.startswith(PREFIX)
        if not control or isinstance(error, Unauthorized | BadBody | BodyTooLarge):
            participant.refused(request.url.path[:200], error)
        headers = {"www-authenticate": "Bearer"} if isinstance(error, Unauthorized) else None
        content = jsoncodec.dumps(error_body(error))
        return Response(content, status_code=error.http_status, headers=headers, media_type="application/json")

    return answer


def _close_at_shutdown(app: FastAPI, participant: Participant) -> None:
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(served: Any) -> AsyncIterator[Any]:
        async with inner(served) as state:
            try:
                yield state
            finally:
                await participant.close()

    app.router.lifespan_context = lifespan
