"""Admission and held responses over real sockets: both APIs, streamed and not, with the prefix and without."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gymckpt import jsoncodec
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.model import ModelOptions, model_app
from gymckpt.wire.client import HttpTransport
from gymckpt.wire.control import PREFIX
from gymckpt.wire.responses import ROUTES, Route
from tests.servers.loopback import served
from tests.servers.policy import ENABLED, TOKEN, HeldWorker, refs

FIRST = "ckpt-000001-00000000"
LONG = 800_000
"""So often repeated, an answer's events fit into no socket's buffer."""


@dataclass
class Reading:
    """A response as it arrives."""

    task: "asyncio.Task[None]"
    data: bytearray
    begun: asyncio.Event
    go_on: asyncio.Event
    """Cleared: its reader reads no further."""

    def text(self) -> str:
        """What the model said."""
        lines = self.data.decode().splitlines()
        if not any(line.startswith("data: ") for line in lines):
            return _said(jsoncodec.loads(bytes(self.data)))
        events = [jsoncodec.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        whole = [event["response"] for event in events if event.get("type") == "response.completed"]
        if whole:
            (response,) = whole
            return _said(response)
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        return "".join(delta.get("content", "") for delta in deltas)


def _said(reply: dict[str, Any]) -> str:
    if "output" in reply:
        return str(reply["output"][0]["content"][0]["text"])
    return str(reply["choices"][0]["message"]["content"])


@dataclass
class Desk:
    worker: HeldWorker
    client: httpx.AsyncClient
    directory: Path
    readings: list[Reading] = field(default_factory=list)

    def ask(self, route: Route, text: str, *, key: str | None, stream: bool, times: int = 1) -> Reading:
        body: dict[str, Any] = {"input": text} if route == "/v1/responses" else {"messages": [{"content": text}]}
        body |= {"times": times, **({"stream": True} if stream else {})}
        path = f"/ng-rollout/{key}{route}" if key else route
        data, begun, go_on = bytearray(), asyncio.Event(), asyncio.Event()
        go_on.set()

        async def read() -> None:
            async with self.client.stream("POST", path, json=body) as response:
                assert response.status_code == 200
                async for chunk in response.aiter_raw():
                    data.extend(chunk)
                    begun.set()
                    await go_on.wait()

        reading = Reading(asyncio.create_task(read()), data, begun, go_on)
        self.readings.append(reading)
        return reading

    async def control(self, operation: str, checkpoint: str, within_s: float = 10.0, **fields: Any) -> dict[str, Any]:
        body = {"checkpoint_id": checkpoint, "deadline_ts": time.time() + within_s, **fields}
        headers = {"authorization": f"Bearer {TOKEN}"}
        reply = await self.client.post(f"{PREFIX}/{operation}", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        value: dict[str, Any] = reply.json()
        return value

    async def commit(self, checkpoint: str, key: str) -> dict[str, Any]:
        directory = self.directory / checkpoint
        directory.mkdir()
        return await self.control("commit", checkpoint, checkpoint_dir=str(directory), episode_ids=refs(key))


@asynccontextmanager
async def desk(directory: Path) -> AsyncIterator[Desk]:
    worker = HeldWorker()
    async with HttpTransport(max_connections=100) as transport:

        def policy(servers: Any) -> Any:
            options = ModelOptions(backend_urls=(servers["worker"].url,), ledger_dir=directory / "ledger")
            return model_app("policy_model", options, ENABLED, Neighbours({}), transport=transport)

        async with (
            served({"policy_model": policy, "worker": lambda _: worker.app}) as servers,
            httpx.AsyncClient(base_url=servers["policy_model"].url, timeout=30) as client,
        ):
            at = Desk(worker, client, directory)
            try:
                yield at
            finally:
                for reading in at.readings:
                    reading.task.cancel()
                await asyncio.gather(*(reading.task for reading in at.readings), return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_response_is_held_until_resume_and_comes_once_and_without_the_prefix_it_passes(
    tmp_path: Path, route: Route, stream: bool
) -> None:
    async def work() -> None:
        async with desk(tmp_path) as at:
            at.worker.gate.clear()
            started = at.ask(route, "started", key="r-1", stream=stream)
            await at.worker.wait_for_calls(1)
            assert (await at.control("prepare", FIRST))["phase"] == "prepared"
            assert (await at.commit(FIRST, "r-1"))["episode_ids"] == ["r-1"]
            newcomer = at.ask(route, "newcomer", key="r-2", stream=stream)
            judge = at.ask(route, "judge", key=None, stream=stream)
            await at.worker.wait_for_calls(2)
            at.worker.gate.set()
            await judge.task
            assert judge.text() == "echo: judge"
            done, _ = await asyncio.wait([started.task, newcomer.task], timeout=0.1)
            assert not done
            assert not started.begun.is_set()
            await at.control("resume", FIRST)
            await asyncio.gather(started.task, newcomer.task)
            assert (started.text(), newcomer.text()) == ("echo: started", "echo: newcomer")
            assert len(at.worker.seen) == 3

    asyncio.run(work())


@pytest.mark.parametrize("route", ROUTES)
def test_only_a_response_that_is_being_streamed_blocks_and_it_counts_as_delivered(tmp_path: Path, route: Route) -> None:
    async def work() -> None:
        async with desk(tmp_path) as at:
            reading = at.ask(route, "long", key="r-1", stream=True, times=LONG)
            reading.go_on.clear()
            await reading.begun.wait()
            report = await at.control("prepare", FIRST, within_s=0.3)
            assert (report["phase"], report["report"]["blockers"]) == ("preparing", ["r-1"])
            reading.go_on.set()
            await reading.task
            assert (await at.control("prepare", FIRST))["phase"] == "prepared"
            assert len((await at.commit(FIRST, "r-1"))["staging_keys"]) == 1

    asyncio.run(work())


def test_a_caller_of_a_stream_that_goes_away_blocks_no_checkpoint(tmp_path: Path) -> None:
    async def work() -> None:
        async with desk(tmp_path) as at:
            reading = at.ask("/v1/responses", "long", key="r-1", stream=True, times=LONG)
            reading.go_on.clear()
            await reading.begun.wait()
            reading.task.cancel()
            await asyncio.wait([reading.task])
            assert (await at.control("prepare", FIRST))["phase"] == "prepared"

    asyncio.run(work())
