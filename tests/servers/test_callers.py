"""What happens to work whose caller goes away, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request

from gymckpt.errors import ServerError
from gymckpt.ports import Deadline, ServerRef, SystemClock
from gymckpt.servers.callers import unless_gone
from gymckpt.wire.client import HttpTransport

CLOCK = SystemClock()


class Server(uvicorn.Server):
    """uvicorn that says when it listens."""

    listening: asyncio.Event

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[ServerRef]:
    server = Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    server.listening = asyncio.Event()
    task = asyncio.create_task(server.serve())
    await server.listening.wait()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield ServerRef("app", f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        await task


def test_work_is_cancelled_when_its_caller_goes_away_and_only_then() -> None:
    async def run() -> None:
        begun, let_go, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def work() -> str:
            begun.set()
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return "done"

        app = FastAPI()

        @app.post("/")
        async def route(request: Request) -> str:
            await request.body()
            return await unless_gone(request, work())

        async with serving(app) as server, HttpTransport(max_connections=5) as transport:
            going = asyncio.create_task(transport.call(server, "POST", "/", {}, deadline=Deadline.after(CLOCK, 30)))
            await begun.wait()
            going.cancel()
            await asyncio.wait([going])
            async with asyncio.timeout(10):
                await cancelled.wait()
            let_go.set()
            reply = await transport.call(server, "POST", "/", {}, deadline=Deadline.after(CLOCK, 30))
            assert reply.body == b'"done"'

    asyncio.run(run())


def test_a_caller_whose_deadline_passes_has_gone_away() -> None:
    async def run() -> None:
        cancelled = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        app = FastAPI()

        @app.post("/")
        async def route(request: Request) -> None:
            await request.body()
            await unless_gone(request, work())

        async with serving(app) as server, HttpTransport(max_connections=5) as transport:
            try:
                await transport.call(server, "POST", "/", {}, deadline=Deadline.after(CLOCK, 0.2))
            except ServerError:
                async with asyncio.timeout(10):
                    await cancelled.wait()

        assert cancelled.is_set()

    asyncio.run(run())
