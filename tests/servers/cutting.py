"""A policy model and a worker whose generations are cut in the middle, on a clock that is moved by hand."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from gymckpt.ports import SystemClock
from gymckpt.servers.worker import worker_app
from gymckpt.servers.worker_scripted import ScriptedEngine, ScriptedOptions
from tests.servers.policy import ENABLED, HeldWorker, Policy, policy

PACE = 100.0
"""Tokens per second of the engine's own time."""
FIRST = "ckpt-000001-00000000"
RESTORE = "ckpt-000002-00000000"
SECOND = "ckpt-000003-00000000"


class HandClock:
    """A clock that the test moves; whoever sleeps wakes at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._moved = asyncio.Condition()
        self.sleepers = 0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return SystemClock().time()

    async def sleep_until(self, monotonic_s: float) -> None:
        async with self._moved:
            self.sleepers += 1
            self._moved.notify_all()
            await self._moved.wait_for(lambda: self.now_s >= monotonic_s)
            self.sleepers -= 1

    async def move(self, seconds: float) -> None:
        """Let that much time pass, and return once everybody asleep has got to its next sleep or its end."""
        self.now_s += seconds
        for _ in range(200):
            async with self._moved:
                self._moved.notify_all()
            await asyncio.sleep(0)

    async def wait_for_sleepers(self, count: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self.sleepers >= count)


@dataclass
class Scene:
    """A policy model server over one scripted worker."""

    server: Policy
    clock: HandClock
    worker: FastAPI

    async def stats(self) -> dict[str, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.worker), base_url="http://worker") as client:
            value: dict[str, Any] = (await client.get("/stats")).json()
            return value


@asynccontextmanager
async def scene(
    directory: Path,
    *,
    wrap: Callable[[FastAPI], None] | None = None,
    tokens: tuple[int, int] = (500, 4000),
    policy_version: str = "v1",
    pace: float = PACE,
    **options: Any,
) -> AsyncIterator[Scene]:
    clock = HandClock()
    scripted = ScriptedOptions(thought_tokens=tokens, tokens_per_second=pace, policy_version=policy_version)
    worker = worker_app(
        "worker", ScriptedEngine(scripted, clock), ENABLED, clock=clock, staging_dir=directory / "staging"
    )
    if wrap is not None:
        wrap(worker)
    async with (
        worker.router.lifespan_context(worker),
        policy(directory, HeldWorker(), apps={"http://worker": worker}, **options) as server,
    ):
        yield Scene(server, clock, worker)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def undisturbed(directory: Path, question: str) -> dict[str, Any]:
    async with scene(directory, pace=0) as play:
        value: dict[str, Any] = (await play.server.ask("r-0", question)).json()
        return value


async def cut_in_the_middle(play: Scene, question: str, tokens_out: int, *, key: str = "r-1") -> dict[str, Any]:
    """Begin a call, let so many tokens out, take a checkpoint, and die; the commit's reply."""
    asking = play.server.asking(key, question)
    await play.clock.wait_for_sleepers(1)
    await play.clock.move(tokens_out / PACE + 0.001)
    assert list((await play.stats())["active"].values()) == [tokens_out]
    reply = await play.server.checkpoint(FIRST, key, resume=False)
    asking.cancel()
    await asyncio.wait([asking])
    return reply


async def answer_after_restore(play: Scene, question: str, key: str = "r-1") -> httpx.Response:
    await play.server.restore(FIRST, RESTORE, key)
    asking = play.server.asking(f"{key}-a1", question)
    for _ in range(100):
        await play.clock.move(1.0)
        if asking.done():
            break
    return await asking
