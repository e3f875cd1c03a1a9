"""The policy model server: `/v1/responses` and `/v1/chat/completions` in front of any OpenAI-compatible backends.

Without checkpoints it is a plain proxy. With them, calls that carry a capture key go through the role; all others
(judges, probes, evaluation tools) always pass.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field, ValidationError, model_validator
from starlette.types import Receive, Scope, Send

from gymckpt import jsoncodec
from gymckpt.errors import GymckptError, StorageFailed, UsageError
from gymckpt.identity import EpisodeId
from gymckpt.participant.marks import Marks
from gymckpt.participant.routes import mount
from gymckpt.ports import Clock, FileSystem, Offload, Reply, SystemClock, ThreadOffload, Transport
from gymckpt.roles.audit import AuditLog
from gymckpt.roles.ledger import Ledger
from gymckpt.roles.model import ModelRole
from gymckpt.roles.model_backends import Backend, Backends, BackendSettings, backend
from gymckpt.roles.model_calls import Delivery
from gymckpt.roles.model_cuts import CutTaker
from gymckpt.roles.model_serving import Serving
from gymckpt.servers.callers import unless_gone
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.scratch import Scratch
from gymckpt.settings import CheckpointSettings, Settings
from gymckpt.storage.files import LocalFileSystem
from gymckpt.wire import responses, sse
from gymckpt.wire.client import HttpTransport
from gymckpt.wire.control import HEADER_RESTART
from gymckpt.wire.responses import Route

MAX_BODY_BYTES = 256 << 20
OFFLOADED_BYTES = 256 << 10
MAX_CONNECTIONS = 100_000
KEEPALIVE_S = 15.0
"""How often a caller that waits for a stream hears that it goes on."""


class ModelOptions(Settings):
    """What a policy model server is told in a deployment. One of `backend` and `backend_urls` is needed."""

    backend: str | None = None
    """Instance name of the backend in the same deployment."""
    backend_urls: tuple[str, ...] = ()
    """OpenAI base URLs, with or without `/v1`."""
    control_urls: tuple[str | None, ...] = ()
    """Where each backend serves generation cuts, if not at the root of its own URL; in the order of `backend_urls`."""
    model: str | None = None
    """Name of the model to ask for; None leaves what the request says."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the backends' API key."""
    call_timeout_s: float = Field(default=3600.0, gt=0)
    outage_patience_s: float | None = Field(default=None, ge=0)
    """How long a call waits for backends that are all away or busy; None: as long as the call may take."""
    max_concurrency: int = Field(default=0, ge=0)
    health_interval_s: float = Field(default=10.0, gt=0)
    generation_cuts: bool | None = None
    """Whether a commit asks the backends for the tokens of calls under way, with the control token. None: a backend of
    the same deployment and those with a control URL, so that the token goes to nobody who was not named for it."""
    ledger_dir: Path | None = None
    """The ledger's own directory; None: a temporary one for the life of the process."""
    audit_path: Path | None = None
    """A line is appended to this file before each call of a rollout is made."""

    @model_validator(mode="after")
    def _one_source(self) -> "ModelOptions":
        if (self.backend is None) == (not self.backend_urls):
            raise ValueError("exactly one of backend and backend_urls is needed")
        if self.control_urls and len(self.control_urls) != max(1, len(self.backend_urls)):
            raise ValueError("control_urls needs one entry for each backend")
        return self


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """The policy model server, as a deployment names it."""
    try:
        settings = ModelOptions.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"options of {instance}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    transport = HttpTransport(max_connections=MAX_CONNECTIONS)
    app = model_app(instance, settings, checkpoint, neighbours, transport=transport)
    _at_shutdown(app, transport.aclose)
    return app


def model_app(
    instance: str,
    options: ModelOptions,
    checkpoint: CheckpointSettings,
    neighbours: Neighbours,
    *,
    transport: Transport,
    clock: Clock | None = None,
    fs: FileSystem | None = None,
    offload: Offload | None = None,
) -> FastAPI:
    """The app over any ports. Its lifespan opens the ledger and watches the backends."""
    clock, offload = clock or SystemClock(), offload or ThreadOffload()
    backends = Backends(_backends(options, neighbours), transport, clock, _backend_settings(options))
    served = _Served(instance, options, backends, clock, fs or LocalFileSystem(), offload)
    app = FastAPI(title=instance, openapi_url=None, lifespan=served.lifespan)
    if checkpoint.enabled:
        assert checkpoint.control_auth_token is not None
        served.enable(transport, checkpoint.control_auth_token.get_secret_value())
        assert served.role is not None
        mount(app, served.role, checkpoint, clock=clock, fs=served.fs, offload=offload)
    _Routes(served).add_to(app)
    return app


class _Served:
    """What the routes stand on."""

    def __init__(
        self,
        instance: str,
        options: ModelOptions,
        backends: Backends,
        clock: Clock,
        fs: FileSystem,
        offload: Offload,
    ) -> None:
        self.backends = backends
        self.fs = fs
        self.offload = offload
        self.role: ModelRole | None = None
        self._instance = instance
        self._options = options
        self._clock = clock
        self._ledger: Ledger | None = None
        self._audit: AuditLog | None = None
        self._scratch: Scratch | None = None

    def enable(self, transport: Transport, token: str) -> None:
        """Take part in checkpoints."""
        directory = self._options.ledger_dir
        if directory is None:
            self._scratch = Scratch("ledger")
            directory = self._scratch.path / "ledger"
        if self._options.audit_path is not None:
            self._audit = AuditLog(self._options.audit_path, self._instance, self._clock, self.offload)
        marks = Marks()
        self._ledger = Ledger(self.fs, self.offload, directory, is_refused=marks.refuses)
        serving = Serving(
            marks=marks,
            clock=self._clock,
            offload=self.offload,
            ledger=self._ledger,
            backends=self.backends,
            audit=self._audit,
        )
        cutter = None
        if self._options.generation_cuts is not False:
            cutter = CutTaker(self._instance, transport, self._clock, self.offload, token, serving.cut_counts)
        self.role = ModelRole(
            self._instance, serving, marks=marks, offload=self.offload, ledger=self._ledger, cutter=cutter
        )

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Everything that begins and ends with serving."""
        watching = asyncio.create_task(self.backends.watch())
        try:
            if self._ledger is not None:
                await self.offload.run(self._ledger.open)
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            if self._ledger is not None:
                await self._ledger.aclose()
            if self._audit is not None:
                self._audit.close()
            if self._scratch is not None:
                await self.offload.run(self._scratch.remove)

    async def call(self, request: Request, route: Route, body: dict[str, Any], size_bytes: int) -> Delivery:
        """The response to a call, once it may be sent."""
        episode = request.scope.get("state", {}).get("episode")
        if self.role is not None and isinstance(episode, EpisodeId):
            restart = request.headers.get(HEADER_RESTART) == "1"
            return await self.role.serve(episode, route, body, size_bytes=size_bytes, restart=restart)
        return Delivery(await self.backends.call(route, body), _nothing)


class _Routes:
    def __init__(self, served: _Served) -> None:
        self._served = served

    def add_to(self, app: FastAPI) -> None:
        app.add_api_route("/", self._liveness, methods=["GET"])
        for route in responses.ROUTES:
            endpoint = self._endpoint(route)
            app.add_api_route(route, endpoint, methods=["POST"], response_model=None)
            if self._served.role is None:
                # A plain proxy takes the prefix too, and makes nothing of it.
                app.add_api_route(
                    f"/ng-rollout/{{capture_key}}{route}", endpoint, methods=["POST"], response_model=None
                )
        app.add_exception_handler(GymckptError, _refuse)
        app.add_exception_handler(OSError, _refuse_os_error)

    async def _liveness(self) -> dict[str, str]:
        return {"status": "ok"}

    def _endpoint(self, route: Route) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            body, size_bytes = await self._object(request)
            if responses.wants_stream(body):
                return _Streamed(route, self._served.call(request, route, body, size_bytes))
            return _Delivered(await unless_gone(request, self._served.call(request, route, body, size_bytes)))

        return endpoint

    async def _object(self, request: Request) -> tuple[dict[str, Any], int]:
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > MAX_BODY_BYTES:
                raise UsageError(f"the body is larger than {MAX_BODY_BYTES} bytes")
        big = len(data) > OFFLOADED_BYTES
        try:
            body = await self._served.offload.run(lambda: jsoncodec.loads(data)) if big else jsoncodec.loads(data)
        except ValueError as error:
            raise UsageError(f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise UsageError("the body is not a JSON object")
        return body, len(data)


class _Streamed(StreamingResponse):
    """A backend's reply as server-sent events; ends with its call, however that went."""

    def __init__(self, route: Route, call: Coroutine[Any, Any, Delivery]) -> None:
        self._waiting = asyncio.ensure_future(call)
        super().__init__(_stream(route, self._waiting), media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # A caller that has gone in the middle neither leaves the call running nor blocks a checkpoint. Nothing is
            # awaited here: whoever cancelled us may do it again at once.
            self._waiting.add_done_callback(_sent)
            self._waiting.cancel()


class _Delivered(Response):
    """A backend's reply as it came; says when it has been sent, however that went."""

    def __init__(self, delivery: Delivery) -> None:
        reply = delivery.reply
        media_type = reply.headers.get("content-type", "application/json")
        super().__init__(reply.body, status_code=reply.status, media_type=media_type)
        self._delivery = delivery

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._delivery.sent()


async def _stream(route: Route, waiting: "asyncio.Future[Delivery]") -> AsyncIterator[bytes]:
    """Keep-alives until the response may be sent, then its events."""
    try:
        while not (await asyncio.wait([waiting], timeout=KEEPALIVE_S))[0]:
            yield sse.KEEPALIVE
        for event in _events(route, waiting.result().reply):
            yield event
    except (GymckptError, OSError) as error:
        for event in sse.failure(route, getattr(error, "code", "internal"), str(error)):
            yield event


def _sent(waiting: "asyncio.Future[Delivery]") -> None:
    if not waiting.cancelled() and waiting.exception() is None:
        waiting.result().sent()


def _events(route: Route, reply: Reply) -> Iterator[bytes]:
    try:
        value = jsoncodec.loads(reply.body)
    except ValueError:
        value = None
    if not 200 <= reply.status < 300 or not isinstance(value, dict):
        return sse.failure(route, "server_error", f"the backend answered HTTP {reply.status}")
    return sse.events(route, value)


def _backends(options: ModelOptions, neighbours: Neighbours) -> list[Backend]:
    control = options.control_urls or (None,) * max(1, len(options.backend_urls))
    if options.backend is not None:
        ref = neighbours.ref(options.backend)
        return [backend(ref.instance, ref.url, control[0])]
    found = []
    for number, (url, control_url) in enumerate(zip(options.backend_urls, control, strict=True)):
        one = backend(f"backend-{number}", url, control_url)
        one.serves_cuts = control_url is not None or options.generation_cuts is True
        found.append(one)
    return found


def _backend_settings(options: ModelOptions) -> BackendSettings:
    key = None
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env)
        if not key:
            raise UsageError(f"environment variable {options.api_key_env} (api_key_env) is not set")
    return BackendSettings(
        model=options.model,
        api_key=key,
        call_timeout_s=options.call_timeout_s,
        outage_patience_s=options.call_timeout_s if options.outage_patience_s is None else options.outage_patience_s,
        max_concurrency=options.max_concurrency,
        health_interval_s=options.health_interval_s,
    )


def _at_shutdown(app: FastAPI, close: Callable[[], Awaitable[None]]) -> None:
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(served: Any) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(close)
            yield await stack.enter_async_context(inner(served))

    app.router.lifespan_context = lifespan


def _nothing() -> None:
    """A response that nobody waits for."""


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, GymckptError)
    return JSONResponse({"error": {"code": error.code, "detail": error.detail}}, error.http_status)


async def _refuse_os_error(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": {"code": StorageFailed.code, "detail": str(error)}}, 500)
