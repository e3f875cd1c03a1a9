"""The agent server over HTTP: sessions and activations for environment servers, and the older flat `/run`."""

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response

from gymckpt.errors import GymckptError
from gymckpt.identity import EpisodeId
from gymckpt.participant.marks import Marks
from gymckpt.participant.prefix import RolloutPrefix
from gymckpt.participant.routes import mount
from gymckpt.ports import Clock, FileSystem, Offload, ServerRef, SystemClock, ThreadOffload, Transport
from gymckpt.roles.agent import AgentRole
from gymckpt.roles.agent_options import AgentOptions
from gymckpt.roles.agent_sessions import Connect, connect_nothing
from gymckpt.roles.neighbours import Neighbourhood
from gymckpt.roles.rows import read_row
from gymckpt.servers.aggregates import add_aggregates
from gymckpt.servers.bodies import BadBody, checked, json_response, read_object, refuse
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.resources.options import read_options
from gymckpt.servers.session_cookies import add_session_cookie
from gymckpt.settings import CheckpointSettings
from gymckpt.wire.client import HttpTransport
from gymckpt.wire.control import HEADER_ACTIVATION, HEADER_BOUNDARIES, HEADER_RESTART, HEADER_TURNS
from gymckpt.wire.gym import AgentSessionRequest, CloseAgentSessionRequest

MAX_CONNECTIONS = 100_000
SESSION_CLASS = "SimpleAgent"
"""What session cookies are named for, with the instance."""


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """See `servers.registry.Builder`."""
    transport = HttpTransport(max_connections=MAX_CONNECTIONS)
    read = read_options(AgentOptions, instance, options)
    return agent_app(instance, read, checkpoint, neighbours.servers, transport=transport)


def agent_app(
    instance: str,
    options: AgentOptions,
    checkpoint: CheckpointSettings,
    servers: Mapping[str, ServerRef],
    *,
    transport: Transport,
    clock: Clock | None = None,
    fs: FileSystem | None = None,
    offload: Offload | None = None,
    connect: Connect = connect_nothing,
) -> FastAPI:
    """The app; with checkpoints enabled, a participant. Closes an `HttpTransport` with itself."""
    clock, offload = clock or SystemClock(), offload or ThreadOffload()
    token = checkpoint.control_auth_token
    control_token = token.get_secret_value() if checkpoint.enabled and token is not None else None
    neighbours = Neighbourhood(servers, transport, clock, offload, control_token)
    role = AgentRole(
        instance,
        options,
        neighbours,
        marks=Marks(),
        offload=offload,
        checkpointing=checkpoint.enabled,
        connect=connect,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await role.aclose()
            if isinstance(transport, HttpTransport):
                await transport.aclose()

    app = FastAPI(title=instance, openapi_url=None, lifespan=lifespan)
    app.state.role = role
    add_session_cookie(app, SESSION_CLASS, instance)
    app.add_exception_handler(GymckptError, refuse)
    if mount(app, role, checkpoint, clock=clock, fs=fs, offload=offload) is None:
        # Activations carry the rollout's prefix even where nobody takes checkpoints.
        app.add_middleware(RolloutPrefix)
    _Routes(role, offload, checkpointing=checkpoint.enabled).add_to(app)
    add_aggregates(app, options, neighbours)
    return app


class _Routes:
    def __init__(self, role: AgentRole, offload: Offload, *, checkpointing: bool) -> None:
        self._role = role
        self._offload = offload
        self._checkpointing = checkpointing

    def add_to(self, app: FastAPI) -> None:
        app.add_api_route("/", self._liveness, methods=["GET"])
        app.add_api_route("/v1/agent_sessions", self._seed, methods=["POST"], response_model=None)
        app.add_api_route("/v1/agent_sessions/close", self._close, methods=["POST"], response_model=None)
        app.add_api_route("/v1/responses", self._activate, methods=["POST"], response_model=None)
        app.add_api_route("/run", self._run, methods=["POST"], response_model=None)

    async def _liveness(self) -> dict[str, str]:
        return {"status": "ok"}

    async def _seed(self, request: Request) -> Response:
        seed = checked(AgentSessionRequest, await read_object(request, self._offload))
        await self._role.look_around()
        session = await self._role.sessions.seed(seed, restart=_says_restart(request) or self._captures_nothing())
        request.session.update(session_id=str(uuid.uuid4()), agent_session_id=session.key)
        headers = {HEADER_RESTART: "1"} if self._checkpointing and session.track.will_restart else None
        return await json_response({"agent_session_id": session.key}, self._offload, headers=headers)

    async def _close(self, request: Request) -> Response:
        close = checked(CloseAgentSessionRequest, await read_object(request, self._offload))
        cookies = await self._role.sessions.close(close.agent_session_id, close.episode_id.episode)
        reply = {
            "agent_session_id": close.agent_session_id,
            "agent_observations": None,
            "resources_cookies": cookies,
        }
        return await json_response(reply, self._offload)

    async def _activate(self, request: Request) -> Response:
        params = await read_object(request, self._offload)
        key = request.session.get("agent_session_id")
        activated = await self._role.sessions.activate(
            key if isinstance(key, str) else None,
            _episode(request),
            _number(request, HEADER_ACTIVATION),
            params,
            restart=self._checkpointing and _says_restart(request),
            boundaries=_number(request, HEADER_BOUNDARIES) or 0,
        )
        headers = {}
        if self._checkpointing:
            headers = {HEADER_BOUNDARIES: str(activated.boundaries), HEADER_TURNS: str(activated.turns)}
        response = await json_response(activated.response, self._offload, headers=headers)
        for name, value in activated.model_cookies.items():
            response.set_cookie(name, value, max_age=14 * 24 * 3600, httponly=True)
        return response

    async def _run(self, request: Request) -> Response:
        row = read_row(await read_object(request, self._offload))
        resources = self._role.options.resources_for(row.taskset)
        task_id = row.named(resources).model_dump()
        result = await self._role.run(row.episode, row.content, task_id, resources)
        return await json_response(result, self._offload)

    def _captures_nothing(self) -> bool:
        return self._checkpointing and not self._role.captures


def _episode(request: Request) -> EpisodeId | None:
    episode = request.scope.get("state", {}).get("episode")
    return episode if isinstance(episode, EpisodeId) else None


def _says_restart(request: Request) -> bool:
    return request.headers.get(HEADER_RESTART, "0") not in ("", "0")


def _number(request: Request, header: str) -> int | None:
    text = request.headers.get(header)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):
        raise BadBody(f"header {header}: {text[:40]!r} is no number")
    return int(text)
