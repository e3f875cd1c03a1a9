"""What a benchmark makes of all results reaches whoever asks the owner of the episodes."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from fastapi import FastAPI, Request

from gymckpt import jsoncodec
from gymckpt.ports import Deadline, Reply, ServerRef, SystemClock
from gymckpt.servers import agent, environment
from gymckpt.servers.deployment import Neighbours
from gymckpt.settings import CheckpointSettings
from gymckpt.wire.client import HttpTransport
from gymckpt.wire.gym import AGGREGATE_METRICS_PATH
from tests.servers.loopback import served

OFF = CheckpointSettings()
Owner = Callable[[Mapping[str, ServerRef]], FastAPI]


def benchmark() -> FastAPI:
    app = FastAPI()

    @app.post(AGGREGATE_METRICS_PATH)
    async def aggregate(request: Request) -> dict[str, Any]:
        return {"key_metrics": {"seen": len((await request.json())["verify_responses"])}}

    return app


def environment_over(*servers: str) -> Owner:
    options = {"agent": "agent", "tasksets": {name: name for name in servers}}
    return lambda refs: environment.build("owner", options, OFF, Neighbours(refs))


def agent_over(server: str) -> Owner:
    options = {"model": "model", "resources_server": server}
    return lambda refs: agent.build("owner", options, OFF, Neighbours(refs))


def asked(owner: Owner) -> list[Reply]:
    """The answers to a GET, by which a collector tells whether the route is there, and to a POST."""

    async def main() -> list[Reply]:
        builds: dict[str, Owner] = {"owner": owner, "benchmark": lambda _: benchmark(), "plain": lambda _: FastAPI()}
        async with (
            served({**builds, "agent": lambda _: FastAPI(), "model": lambda _: FastAPI()}) as refs,
            HttpTransport(max_connections=4) as client,
        ):
            limit = Deadline.after(SystemClock(), 20)
            probed = await client.call(refs["owner"], "GET", AGGREGATE_METRICS_PATH, deadline=limit)
            body = {"verify_responses": [{"reward": 1.0}, {"reward": 0.0}]}
            return [probed, await client.call(refs["owner"], "POST", AGGREGATE_METRICS_PATH, body, deadline=limit)]

    return asyncio.run(main())


@pytest.mark.parametrize(
    "owner", [environment_over("benchmark"), agent_over("benchmark")], ids=["environment", "agent"]
)
def test_it_is_passed_on_to_the_only_resources_server(owner: Owner) -> None:
    probed, told = asked(owner)
    assert probed.status == 405
    assert jsoncodec.loads(told.body) == {"key_metrics": {"seen": 2}}


@pytest.mark.parametrize(
    "owner", [environment_over("plain"), environment_over("benchmark", "plain")], ids=["without it", "two servers"]
)
def test_where_nobody_can_tell_the_route_is_not_there(owner: Owner) -> None:
    assert [reply.status for reply in asked(owner)] == [404, 404]
