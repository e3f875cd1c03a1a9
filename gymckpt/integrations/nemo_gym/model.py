"""A Gym policy model server as a participant: calls of rollouts pass through our role, the app itself is the backend.

A call without a rollout's prefix (a judge, a probe) always passes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from fastapi import FastAPI

from gymckpt import jsoncodec
from gymckpt.errors import ControlError, GymckptError, ServerError
from gymckpt.identity import EpisodeId
from gymckpt.integrations.nemo_gym.bodies import object_in
from gymckpt.integrations.nemo_gym.exchange import Answer, ask, read_body, with_content_length
from gymckpt.integrations.nemo_gym.paths import inner_scope, plain_route
from gymckpt.participant.marks import Marks
from gymckpt.participant.prefix import EPISODE, App, Receive, Scope, Send, error_body, send_json
from gymckpt.ports import Clock, FileSystem, Offload, Reply, ServerRef
from gymckpt.roles.ledger import Ledger
from gymckpt.roles.model import ModelRole
from gymckpt.roles.model_backends import Backend, Backends, BackendSettings, backend
from gymckpt.roles.model_serving import Serving
from gymckpt.servers.scratch import Scratch
from gymckpt.wire import responses, sse
from gymckpt.wire.control import HEADER_RESTART
from gymckpt.wire.responses import Route

KEEPALIVE_S = 15.0
_ROUTES: Final[dict[str, Route]] = {route: route for route in responses.ROUTES}


@dataclass
class _Exchange:
    """The request that a call came with, and the app's whole answer to it."""

    scope: Scope
    answer: Answer | None = None


_CURRENT: ContextVar[_Exchange] = ContextVar("gymckpt_gym_model_call")


class _Inside(Backends):
    """The wrapped app as the only backend. `app` is set once the layer is built around it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__((backend("inside", "http://inside"),), _Nowhere(), clock, BackendSettings())
        self.app: App | None = None

    async def call(
        self,
        route: Route,
        body: Mapping[str, Any],
        *,
        rollout_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        took: Callable[[Backend], None] | None = None,
    ) -> Reply:
        assert self.app is not None
        exchange = _CURRENT.get()
        content = jsoncodec.dumps({name: v for name, v in body.items() if name not in ("stream", "stream_options")})
        scope = with_content_length(inner_scope(exchange.scope, keeps_prefix=True), content)
        exchange.answer = answer = await ask(self.app, scope, content)
        names = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in answer.headers}
        return Reply(answer.status, names, answer.body)


class _Nowhere:
    """No server is asked over HTTP: the app is at hand."""

    async def call(self, server: ServerRef, method: str, path: str, body: Any = None, **_: Any) -> NoReturn:
        raise ServerError(f"{server.instance} is not reached over HTTP")


class ModelParts:
    """Role, ledger and backend of one wrapped model server; its ledger lives as long as the process."""

    def __init__(self, instance: str, *, clock: Clock, fs: FileSystem, offload: Offload) -> None:
        self._offload = offload
        self._scratch = Scratch("ledger")
        marks = Marks()
        self._ledger = Ledger(fs, offload, self._scratch.path / "ledger", is_refused=marks.refuses)
        self.inside = _Inside(clock)
        serving = Serving(marks=marks, clock=clock, offload=offload, ledger=self._ledger, backends=self.inside)
        self.role = ModelRole(instance, serving, marks=marks, offload=offload, ledger=self._ledger)

    def live_with(self, app: FastAPI) -> None:
        """Open with the app's start, close with its end."""
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(served: Any) -> AsyncIterator[Any]:
            async with inner(served) as state:
                await self._offload.run(self._ledger.open)
                try:
                    yield state
                finally:
                    await self._ledger.aclose()
                    await self._offload.run(self._scratch.remove)

        app.router.lifespan_context = lifespan


class ModelLayer:
    """ASGI middleware around a Gym model server. `refused` is told of every refusal."""

    def __init__(self, app: App, *, parts: ModelParts, refused: Callable[[str, ControlError], None]) -> None:
        self._app = app
        self._role = parts.role
        self._refused = refused
        parts.inside.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        episode = scope.get("state", {}).get(EPISODE)
        if scope["type"] != "http" or not isinstance(episode, EpisodeId):
            await self._app(scope, receive, send)
            return
        route = _ROUTES.get(plain_route(scope["path"]))
        try:
            self._role.marks.check(episode)
            if route is None:
                await self._app(inner_scope(scope, keeps_prefix=True), receive, send)
            else:
                await self._call(scope, await read_body(receive), send, episode, route)
        except ControlError as error:
            self._refused(scope["path"][:200], error)
            await send_json(send, error.http_status, error_body(error))
        except GymckptError as error:
            await send_json(send, error.http_status, {"error": {"code": error.code, "detail": error.detail}})

    async def _call(self, scope: Scope, body: bytes, send: Send, episode: EpisodeId, route: Route) -> None:
        fields = object_in(body)
        exchange = _Exchange(scope)
        _CURRENT.set(exchange)
        restart = any(name.lower() == HEADER_RESTART.encode() and value == b"1" for name, value in scope["headers"])
        serving = self._role.serve(episode, route, fields, size_bytes=len(body), restart=restart)
        if responses.wants_stream(fields):
            await _stream(asyncio.ensure_future(serving), route, send)
            return
        delivery = await serving
        try:
            assert exchange.answer is not None
            await exchange.answer.send(send)
        finally:
            delivery.sent()


async def _stream(serving: "asyncio.Future[Any]", route: Route, send: Send) -> None:
    """Keep-alives until the response may be sent, then its events."""

    async def part(data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})

    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    try:
        while not (await asyncio.wait([serving], timeout=KEEPALIVE_S))[0]:
            await part(sse.KEEPALIVE)
        reply: Reply = serving.result().reply
        value = object_in(reply.body)
        if 200 <= reply.status < 300 and value:
            events = sse.events(route, value)
        else:
            events = sse.failure(route, "server_error", f"the model server answered HTTP {reply.status}")
        for event in events:
            await part(event)
    except GymckptError as error:
        for event in sse.failure(route, error.code, error.detail):
            await part(event)
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        if not serving.cancelled() and serving.exception() is None:
            serving.result().sent()
    await part(b"", more=False)
