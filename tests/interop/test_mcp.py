"""NeMo Gym's own tools over MCP on a participant, used by the client of the `mcp` package."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

mcp = pytest.importorskip("mcp", reason="NeMo Gym is not installed")
from mcp.client.streamable_http import streamable_http_client  # noqa: E402

from tests.interop.mixes import COUNTERS, gym_server  # noqa: E402
from tests.interop.test_adapters import BEARER, Rig, rig_of  # noqa: E402

pytestmark = pytest.mark.interop

SEED = {
    "resources_session_id": "caller-1",
    "episode_id": {"rollout_id": "r-1", "attempt": 0},
    "task_id": {"taskset": "counters", "task_id": "0"},
    "task_data": {"initial_count": 3, "expected_count": 6},
}


@pytest.fixture
def counters(tmp_path: Path) -> Iterator[Rig]:
    yield from rig_of(tmp_path, gym_server("server", "resources", COUNTERS, expose_tools_over_mcp=True))


@asynccontextmanager
async def client(rig: Rig, access: Mapping[str, Any]) -> AsyncIterator[Any]:
    async with (
        httpx.AsyncClient(headers=access["headers"], timeout=30.0) as http,
        streamable_http_client(rig.url + access["url_path"], http_client=http) as (read, write, _),
        mcp.ClientSession(read, write) as session,
    ):
        await session.initialize()
        yield session


async def add(session: Any, count: int) -> bool:
    result = await session.call_tool("increment_counter", {"count": count})
    return not result.isError and result.structuredContent == {"success": True}


async def waits(rig: Rig) -> None:
    """Return once a request waits for the checkpoint's end."""
    while (await asyncio.to_thread(rig.status))["report"]["counts"]["waiting"] != 1:
        pass


def access_of_attempt(rig: Rig, attempt: int) -> dict[str, Any]:
    episode = {"rollout_id": "r-1", "attempt": attempt}
    given = rig.ask("/ng-control/v1/mcp-access", {"episode_id": episode}, BEARER)
    assert given.status_code == 200, given.text
    found: dict[str, Any] = given.json()["resources_tools"]
    return found


def refused(rig: Rig, access: Mapping[str, Any]) -> tuple[int, str]:
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "increment_counter"}}
    headers = {"accept": "application/json, text/event-stream", **access["headers"]}
    answer = rig.ask("/mcp", message, headers)
    return answer.status_code, answer.json()["error"]["code"]


def test_what_names_no_session_is_refused_as_our_own_servers_refuse_it(counters: Rig) -> None:
    access: dict[str, Any] = counters.post("/seed_session", SEED).json()["resources_tools"]
    [(header, token)] = access["headers"].items()
    for given in ({}, {header: "forged"}, {header: token[:-1] + ("a" if token[-1] != "a" else "b")}):
        assert refused(counters, {"headers": given}) == (401, "unauthorized")
    malformed: list[dict[str, Any]] = [{"episode_id": 5}, {}]
    for body in malformed:
        answer = counters.ask("/ng-control/v1/mcp-access", body, BEARER)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request"), answer.text


def test_a_client_sees_waiting_and_never_an_error_and_a_new_one_goes_on_after_a_kill(counters: Rig) -> None:
    seeded = counters.post("/seed_session", SEED)
    assert seeded.status_code == 200, seeded.text
    assert seeded.json()["resources_session_id"] == "caller-1"
    access: dict[str, Any] = seeded.json()["resources_tools"]

    async def across_a_checkpoint() -> None:
        async with client(counters, access) as session:
            assert {tool.name for tool in (await session.list_tools()).tools} == {
                "increment_counter",
                "get_counter_value",
            }
            assert await add(session, 1)
            await asyncio.to_thread(counters.control, "prepare", "ckpt-1")
            adding = asyncio.create_task(add(session, 7))  # this one dies with the process
            await waits(counters)
            directory = str(counters.directory)
            await asyncio.to_thread(counters.control, "commit", "ckpt-1", checkpoint_dir=directory, episode_ids=None)
            assert not adding.done()
            await asyncio.to_thread(counters.control, "resume", "ckpt-1")
            assert await adding

    async def after_the_kill() -> None:
        async with client(counters, access_of_attempt(counters, 1)) as session:
            assert await add(session, 2)
            assert (await session.call_tool("get_counter_value", {})).structuredContent == {"count": 6}

    asyncio.run(across_a_checkpoint())
    counters.kill()
    assert refused(counters, access) == (409, "unknown_session")
    counters.restore()
    assert refused(counters, access) == (409, "stale_attempt")
    asyncio.run(after_the_kill())
