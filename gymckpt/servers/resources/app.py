"""A resources server over HTTP: Gym's routes, sessions by signed cookie, and the control plane if asked for."""

import inspect
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import GymckptError, UsageError
from gymckpt.identity import EpisodeId
from gymckpt.jsoncodec import Json
from gymckpt.participant.marks import Marks
from gymckpt.participant.routes import mount
from gymckpt.ports import Clock, FileSystem, Offload, SystemClock, ThreadOffload
from gymckpt.roles.resources import ResourcesRole
from gymckpt.roles.resources_hooks import HookLimits
from gymckpt.servers.resources.declared import check_declared
from gymckpt.servers.resources.mcp_access import add_mcp_access
from gymckpt.servers.resources.requests import DirectRequests, GuardedRequests, Requests
from gymckpt.servers.resources.server import ResourcesServer, Tool
from gymckpt.servers.session_cookies import add_session_cookie
from gymckpt.settings import CheckpointSettings
from gymckpt.storage.files import LocalFileSystem
from gymckpt.wire.control import EXTENSION_MCP_ACCESS, EpisodeRef

if TYPE_CHECKING:
    from gymckpt.servers.resources.mcp_routes import McpRoutes

M = TypeVar("M", bound=BaseModel)

MAX_BODY_BYTES = 256 << 20
BATCH_GRACE_S = 5.0
"""A batch of hooks has this much longer than each hook in it, so that the session which took too long is named."""
OFFLOADED_BYTES = 256 << 10
"""JSON larger than this is read and written off the event loop."""


class _SeedBody(BaseModel):
    """`/seed_session`, typed or flat: a flat row is the task's data itself."""

    model_config = ConfigDict(extra="allow")

    resources_session_id: str | None = Field(default=None, max_length=512)
    episode_id: EpisodeRef | None = None
    task_data: dict[str, Any] | None = None


class _CloseBody(BaseModel):
    episode_id: EpisodeRef | None = None
    resources_session_id: str | None = Field(default=None, max_length=512)


def resources_app(
    server: ResourcesServer,
    checkpoint: CheckpointSettings,
    *,
    clock: Clock | None = None,
    fs: FileSystem | None = None,
    offload: Offload | None = None,
    expose_tools_over_mcp: bool = False,
) -> FastAPI:
    """An app that serves `server`; with checkpoints enabled, as a participant; its tools over MCP too if asked for.

    Raises `UsageError` if MCP is asked for and the extra `gymckpt[mcp]` is not installed, and as `role_of` does.
    """
    clock, offload = clock or SystemClock(), offload or ThreadOffload()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await server.startup()
        try:
            yield
        finally:
            await server.shutdown()

    app = FastAPI(title=server.instance, openapi_url=None, lifespan=lifespan)
    add_session_cookie(app, type(server).__name__, server.instance)
    requests: Requests = DirectRequests(server)
    mcp = mcp_routes(server) if expose_tools_over_mcp else None
    if checkpoint.enabled:
        extensions = (EXTENSION_MCP_ACCESS,) if mcp is not None else ()
        role = role_of(server, clock, extensions=extensions)
        requests = GuardedRequests(server, role)
        mount(app, role, checkpoint, clock=clock, fs=fs or LocalFileSystem(), offload=offload)
        if mcp is not None:
            add_mcp_access(app, role, checkpoint, mcp.access)
    if mcp is not None:
        mcp.add_to(app, requests)
    _Routes(server, requests, offload, mcp).add_to(app)
    return app


def role_of(server: ResourcesServer, clock: Clock, *, extensions: Sequence[str] = ()) -> ResourcesRole:
    """The participant's part of `server`, with the modes and the time limit that its class states.

    Raises `UsageError` if these cannot hold together, or a hook that they need is missing.
    """
    check_declared(server)
    return ResourcesRole(
        server.instance,
        server,
        mode=server.checkpoint_mode,
        verify=server.checkpoint_verify,
        marks=Marks(),
        clock=clock,
        limits=HookLimits(hook_s=server.checkpoint_hook_s + BATCH_GRACE_S),
        extensions=extensions,
    )


def mcp_routes(server: ResourcesServer) -> "McpRoutes":
    """What `server` needs to speak MCP; raises `UsageError` without the extra."""
    try:
        from gymckpt.servers.resources.mcp_routes import McpRoutes
    except ImportError as error:
        raise UsageError(
            f"{server.instance}: tools over MCP need the package mcp", hint="pip install 'gymckpt[mcp]'"
        ) from error
    return McpRoutes(server)


class _Routes:
    def __init__(self, server: ResourcesServer, requests: Requests, offload: Offload, mcp: "McpRoutes | None") -> None:
        self._server = server
        self._requests = requests
        self._offload = offload
        self._mcp = mcp

    def add_to(self, app: FastAPI) -> None:
        app.add_api_route("/", self._liveness, methods=["GET"])
        app.add_api_route("/seed_session", self._seed, methods=["POST"], response_model=None)
        app.add_api_route("/verify", self._verify, methods=["POST"], response_model=None)
        app.add_api_route("/close_session", self._close, methods=["POST"], response_model=None)
        for name, tool in self._server.tools().items():
            app.add_api_route(f"/{name}", self._tool_route(name, tool), methods=["POST"], response_model=None)
        app.add_exception_handler(GymckptError, _refuse)

    async def _liveness(self) -> dict[str, str]:
        return {"status": "ok"}

    async def _seed(self, request: Request) -> Response:
        body, _ = await self._object(request)
        seed = _checked(_SeedBody, body)
        episode = _episode_of(request, seed)
        task_data = body if seed.task_data is None else seed.task_data
        session_id, headers = await self._requests.seed(episode, seed.resources_session_id, task_data)
        request.session["session_id"] = session_id
        reply = {
            "resources_session_id": seed.resources_session_id,
            "resources_tools": self._mcp.access(session_id, episode) if self._mcp is not None else None,
            "sandbox_access": None,
        }
        return JSONResponse(reply, headers=headers)

    async def _verify(self, request: Request) -> Response:
        body, size_bytes = await self._object(request)
        verdict = await self._requests.verify(_session_id(request), episode_of_path(request), body)
        return await self._json({**body, **verdict}, size_bytes)

    async def _close(self, request: Request) -> Response:
        body, _ = await self._object(request)
        close = _checked(_CloseBody, body)
        await self._requests.close(_session_id(request), _episode_of(request, close), close.resources_session_id)
        return JSONResponse({"resources_session_id": close.resources_session_id})

    def _tool_route(self, name: str, tool: Tool) -> Any:
        signature = inspect.signature(tool)

        async def route(request: Request) -> Response:
            arguments, size_bytes = await self._object(request)
            try:
                signature.bind(None, **arguments)
            except TypeError as error:
                return JSONResponse({"error": f"{name}: {error}"}, 422)
            episode = episode_of_path(request)
            answer = await self._requests.call(_session_id(request), episode, tool, arguments)
            return await self._json(answer, size_bytes)

        return route

    async def _object(self, request: Request) -> tuple[dict[str, Any], int]:
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > MAX_BODY_BYTES:
                raise UsageError(f"the body is larger than {MAX_BODY_BYTES} bytes")
        try:
            big = len(data) > OFFLOADED_BYTES
            body = await self._offload.run(lambda: jsoncodec.loads(data)) if big else jsoncodec.loads(data or b"{}")
        except ValueError as error:
            raise UsageError(f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise UsageError("the body is not a JSON object")
        return body, len(data)

    async def _json(self, value: Json, about_bytes: int) -> Response:
        big = about_bytes > OFFLOADED_BYTES
        content = await self._offload.run(lambda: jsoncodec.dumps(value)) if big else jsoncodec.dumps(value)
        return Response(content, media_type="application/json")


def _session_id(request: Request) -> str | None:
    session_id = request.session.get("session_id")
    return session_id if isinstance(session_id, str) else None


def episode_of_path(request: Request) -> EpisodeId | None:
    """The episode that the rollout prefix of the request's path named, if any."""
    episode = request.scope.get("state", {}).get("episode")
    return episode if isinstance(episode, EpisodeId) else None


def _episode_of(request: Request, body: _SeedBody | _CloseBody) -> EpisodeId | None:
    return episode_of_path(request) or (body.episode_id.episode if body.episode_id else None)


def _checked(model: type[M], body: dict[str, Any]) -> M:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, GymckptError)
    return JSONResponse({"error": {"code": error.code, "detail": error.detail}}, error.http_status)
