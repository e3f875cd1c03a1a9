"""A network between simulated processes: every hop takes its time, and a killed process breaks its connections.

A request that was sent arrives even if its sender has died or given up since; what a server was doing for a caller that
is gone goes on, as it does behind a real socket.
"""

import asyncio
import contextvars
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

from gymckpt import jsoncodec
from gymckpt.errors import DeadlinePassed, NotSent, ServerError
from gymckpt.ports import Deadline, Reply, ServerRef
from tests.simulation.processes import Process, ProcessClock, current_process
from tests.simulation.transport import AsgiApp, Exchange, Fault, ask_app

LONGEST_HOP_S = 0.05

Answered = Callable[[Exchange, Reply], None]
"""Called when a server has answered, whether or not the reply arrives."""


@dataclass
class _Host:
    app: AsgiApp
    process: Process


class Network:
    """Apps by URL. `transport` gives the calling process its `ports.Transport`."""

    def __init__(self, rng: random.Random) -> None:
        self.faults: list[Fault] = []
        self.answered: list[Answered] = []
        self._rng = rng
        self._hosts: dict[str, _Host] = {}

    def serve(self, server: ServerRef, app: AsgiApp, process: Process) -> None:
        """Bring a server up; it is gone as soon as its process is."""
        host = self._hosts[server.url] = _Host(app, process)

        def down() -> None:
            if self._hosts.get(server.url) is host:
                del self._hosts[server.url]

        process.on_death.add(down)

    async def call(
        self,
        server: ServerRef,
        method: str,
        path: str,
        body: Any = None,
        *,
        deadline: Deadline,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
    ) -> Reply:
        """See `ports.Transport.call`."""
        caller = current_process()
        gone = asyncio.Event()
        if caller is not None:
            caller.check()
            caller.on_death.add(gone.set)
        content = body if isinstance(body, bytes) else b"" if body is None else jsoncodec.dumps(body)
        where = f"{method} {path} ({server.instance})"
        exchange = asyncio.get_running_loop().create_task(
            self._exchange(server, where, (method, path, content, dict(headers or {}), dict(cookies or {}), gone)),
            context=contextvars.Context(),
        )
        exchange.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await asyncio.shield(exchange)
        except TimeoutError:
            raise DeadlinePassed(f"{where} did not answer before its deadline") from None
        finally:
            gone.set()
            if caller is not None:
                caller.on_death.discard(gone.set)

    async def _exchange(self, server: ServerRef, where: str, request: tuple[Any, ...]) -> Reply:
        method, path, content = request[:3]
        faults = [fault for fault in self.faults if fault.takes(server, path)]
        self.faults = [fault for fault in self.faults if fault.times > 0]
        kinds = {fault.kind for fault in faults}
        await self._hop(sum(fault.delay_s for fault in faults if fault.kind == "delay_request"))
        host = self._hosts.get(server.url)
        if host is None or "refused" in kinds:
            raise NotSent(f"{where} refused the connection")
        if "lost_request" in kinds:
            raise ServerError(f"{where}: the connection broke")
        reply = await self._handled(host, where, request)
        for told in self.answered:
            told(Exchange(server.instance, method, path, jsoncodec.loads(content) if content else None), reply)
        await self._hop(sum(fault.delay_s for fault in faults if fault.kind == "delay_reply"))
        if "lost_reply" in kinds:
            raise ServerError(f"{where}: the connection broke")
        return reply

    async def _hop(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s + self._rng.random() * LONGEST_HOP_S)

    async def _handled(self, host: _Host, where: str, request: tuple[Any, ...]) -> Reply:
        broken = asyncio.get_running_loop().create_future()

        def breaks() -> None:
            if not broken.done():
                broken.set_result(None)

        host.process.on_death.add(breaks)
        task = host.process.run(ask_app(host.app, *request))
        try:
            await asyncio.wait([task, broken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            host.process.on_death.discard(breaks)
            broken.cancel()
        if not task.done() or task.cancelled():
            raise ServerError(f"{where}: the connection broke")
        date = {"date": formatdate(ProcessClock(host.process).time(), usegmt=True)}
        if (error := task.exception()) is not None:
            return Reply(500, date, f"{type(error).__name__}: {error}".encode())
        reply = task.result()
        return Reply(reply.status, {**reply.headers, **date}, reply.body, reply.cookies)
