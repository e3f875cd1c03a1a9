"""The environment server over HTTP: `POST /run`, typed episodes and flat rows, single agent turn."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response

from gymckpt.errors import GymckptError
from gymckpt.participant.marks import Marks
from gymckpt.participant.routes import mount
from gymckpt.ports import Clock, FileSystem, Offload, ServerRef, SystemClock, ThreadOffload, Transport
from gymckpt.roles.environment import EnvironmentOptions, EnvironmentRole
from gymckpt.roles.failures import EpisodeFailed
from gymckpt.roles.neighbours import Neighbourhood
from gymckpt.roles.rows import read_row
from gymckpt.servers.aggregates import add_aggregates
from gymckpt.servers.bodies import checked, json_response, read_object, refuse
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.resources.options import read_options
from gymckpt.settings import CheckpointSettings
from gymckpt.wire.client import HttpTransport
from gymckpt.wire.gym import RunRequest

MAX_CONNECTIONS = 100_000
"""One for each call in flight: a limit here would make episodes wait for each other."""


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """See `servers.registry.Builder`."""
    transport = HttpTransport(max_connections=MAX_CONNECTIONS)
    read = read_options(EnvironmentOptions, instance, options)
    return environment_app(instance, read, checkpoint, neighbours.servers, transport=transport)


def environment_app(
    instance: str,
    options: EnvironmentOptions,
    checkpoint: CheckpointSettings,
    servers: Mapping[str, ServerRef],
    *,
    transport: Transport,
    clock: Clock | None = None,
    fs: FileSystem | None = None,
    offload: Offload | None = None,
) -> FastAPI:
    """The app; with checkpoints enabled, a participant. Closes an `HttpTransport` with itself."""
    clock, offload = clock or SystemClock(), offload or ThreadOffload()
    token = checkpoint.control_auth_token
    control_token = token.get_secret_value() if checkpoint.enabled and token is not None else None
    neighbours = Neighbourhood(servers, transport, clock, offload, control_token)
    role = EnvironmentRole(
        instance, options, neighbours, marks=Marks(), offload=offload, checkpointing=checkpoint.enabled
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
    app.add_exception_handler(GymckptError, refuse)
    mount(app, role, checkpoint, clock=clock, fs=fs, offload=offload)
    routes = _Routes(role, offload)
    app.add_api_route("/", routes.liveness, methods=["GET"])
    app.add_api_route("/run", routes.run, methods=["POST"], response_model=None)
    add_aggregates(app, options, neighbours)
    return app


class _Routes:
    def __init__(self, role: EnvironmentRole, offload: Offload) -> None:
        self._role = role
        self._offload = offload

    async def liveness(self) -> dict[str, str]:
        return {"status": "ok"}

    async def run(self, request: Request) -> Response:
        body = await read_object(request, self._offload)
        if "episode_id" in body and "task" in body:
            return await json_response(await self._typed(checked(RunRequest, body)), self._offload)
        row = read_row(body)
        resources = self._role.options.resources_for(row.taskset)
        result = await self._role.run(row.episode, row.task(resources), resources)
        return await json_response(result, self._offload)

    async def _typed(self, run: RunRequest) -> dict[str, Any]:
        reply: dict[str, Any] = {
            "episode_id": run.episode_id.model_dump(),
            "task_id": run.task.task_id.model_dump(),
        }
        try:
            reply["result"] = await self._role.run(run.episode_id.episode, run.task)
        except EpisodeFailed as failed:
            reply["failure"] = failed.as_json()
        return reply
