"""Tools over MCP, used by the client of the `mcp` package over real sockets."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gymckpt.errors import UsageError
from gymckpt.identity import EpisodeId
from gymckpt.jsoncodec import Json
from gymckpt.ports import Deadline, ServerRef, SystemClock
from gymckpt.servers.resources.app import resources_app
from gymckpt.servers.resources.server import Call, tool
from gymckpt.servers.resources.tool_schema import describe
from gymckpt.settings import CheckpointSettings
from gymckpt.wire.client import HttpTransport, json_object
from gymckpt.wire.control import PREFIX
from gymckpt.wire.gym import MCP_ACCESS_PATH
from tests.roles.tally import Tally
from tests.servers.loopback import served
from tests.servers.resources_desk import OFF, TOKEN, on

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")
from mcp.client.streamable_http import streamable_http_client  # noqa: E402

A = EpisodeId("a")
X, Y, Z = "ckpt-000001-0000000a", "ckpt-000002-0000000b", "ckpt-000003-0000000c"
BEARER = {"authorization": f"Bearer {TOKEN}"}


class Announcing(Tally):
    """Says when a tool has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.began = asyncio.Event()

    @tool
    async def add(self, call: Call, *, number: int, seconds: float = 0.0) -> Json:
        self.began.set()
        return await super().add(call, number=number, seconds=seconds)


class Clients:
    """Whoever talks to the server: a controller, an environment, and MCP clients."""

    def __init__(self, server: ServerRef, transport: HttpTransport) -> None:
        self.server = server
        self.transport = transport

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
        deadline = Deadline.after(SystemClock(), 30.0)
        reply = await self.transport.call(self.server, "POST", path, body, deadline=deadline, headers=headers)
        return json_object(reply, path)

    async def control(self, operation: str, checkpoint_id: str, **fields: Any) -> Any:
        body = {"checkpoint_id": checkpoint_id, "deadline_ts": SystemClock().time() + 30, **fields}
        return await self.post(f"{PREFIX}/{operation}", body, BEARER)

    async def seed(self, episode: EpisodeId, **task_data: Any) -> dict[str, Any]:
        """The session's MCP access."""
        reference = {"rollout_id": episode.rollout_id, "attempt": episode.attempt}
        seeded = await self.post("/seed_session", {"episode_id": reference, "task_data": task_data})
        access: dict[str, Any] = seeded["resources_tools"]
        return access

    async def access(self, episode: EpisodeId) -> dict[str, Any]:
        """The same, given anew."""
        reference = {"rollout_id": episode.rollout_id, "attempt": episode.attempt}
        renewed = await self.post(MCP_ACCESS_PATH, {"episode_id": reference}, BEARER)
        access: dict[str, Any] = renewed["resources_tools"]
        return access

    @asynccontextmanager
    async def client(self, access: Mapping[str, Any]) -> AsyncIterator[Any]:
        """A real client, initialised."""
        async with (
            httpx.AsyncClient(headers=access["headers"], timeout=30.0) as http,
            streamable_http_client(self.server.url + access["url_path"], http_client=http) as (read, write, _),
            mcp.ClientSession(read, write) as session,
        ):
            await session.initialize()
            yield session

    async def refused(self, access: Mapping[str, Any]) -> int:
        """Status of a tool call by this token."""
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add", "arguments": ADD}}
        headers = {"accept": "application/json, text/event-stream", **access["headers"]}
        deadline = Deadline.after(SystemClock(), 30.0)
        reply = await self.transport.call(self.server, "POST", "/mcp", message, deadline=deadline, headers=headers)
        return reply.status


ADD = {"number": 1}


@asynccontextmanager
async def serving(settings: CheckpointSettings, tally: Tally | None = None) -> AsyncIterator[Clients]:
    def build(_: Mapping[str, ServerRef]) -> FastAPI:
        return resources_app(tally or Tally(), settings, expose_tools_over_mcp=True)

    async with served({"tally": build}) as refs, HttpTransport(max_connections=20) as transport:
        yield Clients(refs["tally"], transport)


def total(result: Any) -> int:
    assert not result.isError, result
    number: int = result.structuredContent["total"]
    return number


def test_a_client_sees_waiting_and_never_an_error_across_a_checkpoint_and_a_new_one_goes_on_after_it(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with serving(on(tmp_path)) as clients:
            access = await clients.seed(A, total=5)
            async with clients.client(access) as client:
                assert total(await client.call_tool("add", ADD)) == 6
                await clients.control("prepare", X)
                waiting = asyncio.create_task(client.call_tool("add", ADD))
                beginning = asyncio.create_task(asking(clients, access))
                await clients.control("commit", X, checkpoint_dir=str(tmp_path / X), episode_ids=None)
                await at_the_gate(clients, 2)
                assert not waiting.done() | beginning.done()
                await clients.control("resume", X)
                assert total(await waiting) == 7
                assert await beginning == ["add"]
        async with serving(on(tmp_path)) as clients:
            await clients.control("restore", Y, checkpoint_dir=str(tmp_path / X), episode_ids=[{"rollout_id": "a"}])
            await clients.control("resume", Y)
            assert await clients.refused(access) == 401
            async with clients.client(await clients.access(EpisodeId("a", 1))) as client:
                assert total(await client.call_tool("add", ADD)) == 7  # the checkpoint was before the second call

    async def asking(clients: Clients, access: Mapping[str, Any]) -> list[str]:
        async with clients.client(access) as client:
            return [listed.name for listed in (await client.list_tools()).tools]

    asyncio.run(main())


async def at_the_gate(clients: Clients, count: int) -> None:
    """Return once so many requests wait for the checkpoint's end."""
    while True:
        deadline = Deadline.after(SystemClock(), 30.0)
        path = f"{PREFIX}/status"
        reply = await clients.transport.call(clients.server, "GET", path, deadline=deadline, headers=BEARER)
        if json_object(reply, path)["report"]["counts"]["waiting"] == count:
            return


def test_each_post_is_one_unit_and_blocks_by_its_capture_key(tmp_path: Path) -> None:
    async def main() -> None:
        tally = Announcing()
        async with serving(on(tmp_path), tally) as clients, clients.client(await clients.seed(A)) as client:
            running = asyncio.create_task(client.call_tool("add", {"number": 1, "seconds": 0.8}))
            await tally.began.wait()
            missed = await clients.control("prepare", X, deadline_ts=SystemClock().time() + 0.2)
            assert (missed["phase"], missed["report"]["blockers"]) == ("preparing", ["a"])
            assert (await clients.control("prepare", X))["phase"] == "prepared"
            assert list(tally.totals.values()) == [1]
            await clients.control("resume", X)
            assert total(await running) == 1

    asyncio.run(main())


def test_a_retired_session_and_a_forged_token_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(on(tmp_path)) as clients:
            access = await clients.seed(A)
            await clients.control("retire", X, episode_ids=[{"rollout_id": "a"}])
            assert await clients.refused(access) == 409
            assert await clients.refused({"headers": {}}) == 401
            token = next(iter(access["headers"].values()))
            assert await clients.refused({"headers": dict.fromkeys(access["headers"], token[:-1])}) == 401

    asyncio.run(main())


def test_a_client_of_a_dead_attempt_is_refused_by_the_process_that_gave_its_token(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(on(tmp_path)) as clients:
            access = await clients.seed(A, total=5)
            await clients.control("prepare", X)
            await clients.control("commit", X, checkpoint_dir=str(tmp_path / X), episode_ids=None)
            await clients.control("resume", X)
            await clients.control("retire", Z, episode_ids=[{"rollout_id": "a"}])
            await clients.control("restore", Y, checkpoint_dir=str(tmp_path / X), episode_ids=[{"rollout_id": "a"}])
            await clients.control("resume", Y)
            assert await clients.refused(access) == 409
            async with clients.client(await clients.access(EpisodeId("a", 1))) as client:
                assert total(await client.call_tool("add", ADD)) == 6

    asyncio.run(main())


def test_a_retire_stops_a_tool_once_and_waits_for_its_clean_up(tmp_path: Path) -> None:
    async def main() -> None:
        tally = Announcing()
        async with serving(on(tmp_path), tally) as clients:
            access = await clients.seed(A)
            message = {"name": "add", "arguments": {"number": 1, "seconds": 60.0}}
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": message}
            headers = {"accept": "application/json, text/event-stream", **access["headers"]}
            calling = asyncio.create_task(post_status(clients, body, headers))
            await tally.began.wait()
            await clients.control("retire", X, episode_ids=[{"rollout_id": "a"}])
            assert tally.cancelled == 1
            assert await calling == 409

    async def post_status(clients: Clients, body: Any, headers: Mapping[str, str]) -> int:
        deadline = Deadline.after(SystemClock(), 60.0)
        reply = await clients.transport.call(clients.server, "POST", "/mcp", body, deadline=deadline, headers=headers)
        return reply.status

    asyncio.run(main())


def test_what_a_model_gets_wrong_is_an_answer_and_no_failure(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(OFF) as clients, clients.client(await clients.seed(A)) as client:
            for name, arguments in (("nothing", {}), ("add", {"wrong": 1})):
                result = await client.call_tool(name, arguments)
                assert result.isError
                assert name in result.content[0].text
            assert total(await client.call_tool("add", ADD)) == 1

    asyncio.run(main())


def test_a_server_that_does_not_speak_mcp_says_so_in_the_seeds_reply() -> None:
    async def main() -> None:
        async with (
            served({"tally": lambda _: resources_app(Tally(), OFF)}) as refs,
            HttpTransport(max_connections=2) as transport,
        ):
            clients = Clients(refs["tally"], transport)
            assert await clients.seed(A) is None
            assert await clients.refused({"headers": {}}) == 404

    asyncio.run(main())


def test_without_the_extra_asking_for_mcp_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymckpt.servers.resources.mcp_routes", None)
    with pytest.raises(UsageError, match="need the package mcp") as caught:
        resources_app(Tally(), OFF, expose_tools_over_mcp=True)
    assert caught.value.hint == "pip install 'gymckpt[mcp]'"


def test_a_tool_is_described_by_its_docstring_and_signature() -> None:
    async def paint(call: Any, *, colour: str, coats: int = 1) -> None:
        """Paint the wall."""

    described = describe(paint)
    assert described.description == "Paint the wall."
    assert set(described.parameters["properties"]) == {"colour", "coats"}
    assert described.parameters["required"] == ["colour"]
    assert described.parameters["additionalProperties"] is False
