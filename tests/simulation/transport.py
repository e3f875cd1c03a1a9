"""An in-memory network: `ports.Transport` onto ASGI apps, with lost, late and refused exchanges.

Handlers run on as tasks of their own when their caller has gone, as they do behind a real server. A server that is
taken down breaks what was under way and refuses what comes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from gymckpt import jsoncodec
from gymckpt.errors import DeadlinePassed, NotSent, ServerError
from gymckpt.ports import Deadline, Reply, ServerRef

Message = MutableMapping[str, Any]
AsgiApp = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]

FaultKind = Literal["refused", "lost_request", "lost_reply", "delay_request", "delay_reply"]


@dataclass
class Fault:
    """What goes wrong with exchanges to `server` whose path ends with `path_end`, the next `times` times."""

    kind: FaultKind
    server: str
    path_end: str = ""
    times: int = 1
    delay_s: float = 0.0

    def takes(self, server: ServerRef, path: str) -> bool:
        """Whether this fault befalls the exchange; counts it down."""
        if self.times <= 0 or self.server != server.instance or not path.endswith(self.path_end):
            return False
        self.times -= 1
        return True


@dataclass(frozen=True)
class Exchange:
    """One request that reached a server."""

    server: str
    method: str
    path: str
    body: Any
    cookies: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Host:
    app: AsgiApp
    running: set[asyncio.Task[Any]] = field(default_factory=set)


class MemoryNetwork:
    """Apps by URL. One network is shared by all who call; it is a `Transport` itself."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self.faults: list[Fault] = []
        self.exchanges: list[Exchange] = []
        """Every request that reached a server, in order of arrival."""

    def serve(self, server: ServerRef, app: AsgiApp) -> None:
        """Bring a server up."""
        self._hosts[server.url] = _Host(app)

    def take_down(self, server: ServerRef) -> None:
        """As SIGKILL does: what runs is gone, connections break, and whoever calls is refused."""
        host = self._hosts.pop(server.url, None)
        for task in list(host.running) if host is not None else []:
            task.cancel()

    def sent(self, operation: str) -> list[str]:
        """The instances that received control calls of this operation, in order of arrival."""
        return [e.server for e in self.exchanges if e.path.endswith(f"/{operation}")]

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
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await self._exchange(server, method, path, body, dict(headers or {}), dict(cookies or {}))
        except TimeoutError:
            raise DeadlinePassed(f"{method} {path} ({server.instance}) did not answer before its deadline") from None

    async def _exchange(
        self,
        server: ServerRef,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str],
        cookies: dict[str, str],
    ) -> Reply:
        where = f"{method} {path} ({server.instance})"
        faults = [fault for fault in self.faults if fault.takes(server, path)]
        kinds = {fault.kind for fault in faults}
        await asyncio.sleep(sum(fault.delay_s for fault in faults if fault.kind == "delay_request"))
        host = self._hosts.get(server.url)
        if host is None or "refused" in kinds:
            raise NotSent(f"{where} refused the connection")
        if "lost_request" in kinds:
            raise ServerError(f"{where}: the connection broke")
        content = body if isinstance(body, bytes) else b"" if body is None else jsoncodec.dumps(body)
        received = jsoncodec.loads(content) if content else None
        self.exchanges.append(Exchange(server.instance, method, path, received, cookies))
        reply = await self._handled(host, where, method, path, content, headers, cookies)
        await asyncio.sleep(sum(fault.delay_s for fault in faults if fault.kind == "delay_reply"))
        if "lost_reply" in kinds:
            raise ServerError(f"{where}: the connection broke")
        return reply

    async def _handled(
        self,
        host: _Host,
        where: str,
        method: str,
        path: str,
        content: bytes,
        headers: dict[str, str],
        cookies: dict[str, str],
    ) -> Reply:
        gone = asyncio.Event()
        task = asyncio.create_task(ask_app(host.app, method, path, content, headers, cookies, gone))
        host.running.add(task)
        task.add_done_callback(host.running.discard)
        try:
            await asyncio.wait([task])
        finally:
            gone.set()
        if task.cancelled():
            raise ServerError(f"{where}: the connection broke")
        if (error := task.exception()) is not None:
            return Reply(500, {}, f"{type(error).__name__}: {error}".encode())
        return task.result()


async def ask_app(
    app: AsgiApp,
    method: str,
    path: str,
    content: bytes,
    headers: dict[str, str],
    cookies: dict[str, str],
    gone: asyncio.Event,
) -> Reply:
    """One request to an app, in the form in which servers give it; `gone` tells it that the caller has left."""
    url = urlsplit(path)
    sent = {"host": "memory", "content-length": str(len(content)), "content-type": "application/json", **headers}
    if cookies:
        sent["cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(url.path),
        "raw_path": url.path.encode(),
        "query_string": url.query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in sent.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    given = False
    status = 500
    reply_headers: list[tuple[bytes, bytes]] = []
    chunks: list[bytes] = []

    async def receive() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": content, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            reply_headers.extend(message.get("headers", []))
        elif message["type"] == "http.response.body":
            chunks.append(bytes(message.get("body", b"")))

    await app(scope, receive, send)
    return _reply(status, reply_headers, b"".join(chunks))


def _reply(status: int, pairs: list[tuple[bytes, bytes]], body: bytes) -> Reply:
    headers: dict[str, str] = {}
    cookies: dict[str, str] = {}
    for raw_name, raw_value in pairs:
        name, value = raw_name.decode().lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
        if name == "set-cookie":
            cookies.update({key: morsel.value for key, morsel in SimpleCookie(value).items()})
    return Reply(status, headers, body, cookies)
