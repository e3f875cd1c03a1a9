"""The HTTP client over real sockets: what is known to be unsent, what is not, and what is refused."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from gymckpt.errors import DeadlinePassed, NotSent, ServerError
from gymckpt.ports import Deadline, Reply, ServerRef, SystemClock
from gymckpt.wire.client import HttpTransport, json_object

T = TypeVar("T")
Handler = Callable[[bytes], Awaitable[bytes | None]]
CLOCK = SystemClock()


def http(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    return head + await reader.readexactly(length)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[ServerRef]:
    """A raw server; a handler that gives None drops the connection without a reply."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (reply := await handler(await read_request(reader))) is not None:
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield ServerRef("peer", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()


async def exchange(
    handler: Handler, *, deadline_s: float = 5.0, max_reply_bytes: int = 1 << 20, cookies: dict[str, str] | None = None
) -> Reply:
    async with serving(handler) as server, HttpTransport(max_connections=8, max_reply_bytes=max_reply_bytes) as client:
        deadline = Deadline.after(CLOCK, deadline_s)
        return await client.call(server, "POST", "/x", {"a": 1}, deadline=deadline, cookies=cookies)


def test_a_refused_connection_proves_that_nothing_was_sent() -> None:
    async def main() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            async with HttpTransport(max_connections=8) as client:
                await client.call(ServerRef("gone", url), "POST", "/x", {}, deadline=Deadline.after(CLOCK, 5))

    with pytest.raises(NotSent, match=r"POST http://127.0.0.1:\d+/x \(gone\) refused the connection"):
        asyncio.run(main())


def test_a_connection_that_breaks_after_the_request_proves_nothing() -> None:
    async def drop(request: bytes) -> bytes | None:
        return None

    with pytest.raises(ServerError, match="the connection broke") as caught:
        asyncio.run(exchange(drop))
    assert not isinstance(caught.value, NotSent)


def test_a_post_is_never_sent_a_second_time_by_the_client_itself() -> None:
    received: list[bytes] = []

    async def once_then_drop(request: bytes) -> bytes | None:
        received.append(request)
        return http(b"{}") if len(received) == 1 else None

    async def main() -> None:
        async with serving(once_then_drop) as server, HttpTransport(max_connections=1) as client:
            await client.call(server, "POST", "/x", {}, deadline=Deadline.after(CLOCK, 5))
            await client.call(server, "POST", "/x", {}, deadline=Deadline.after(CLOCK, 5))

    with pytest.raises(ServerError):
        asyncio.run(main())
    assert len(received) == 2


def test_a_silent_server_costs_no_more_than_the_deadline() -> None:
    async def silent(request: bytes) -> bytes | None:
        await asyncio.Event().wait()
        return None

    with pytest.raises(DeadlinePassed, match="did not answer before its deadline"):
        asyncio.run(exchange(silent, deadline_s=0.2))


def test_a_reply_larger_than_allowed_is_refused_before_it_is_held() -> None:
    async def large(request: bytes) -> bytes | None:
        return http(b"x" * 300_000)

    with pytest.raises(ServerError, match="sent more than 1000 bytes"):
        asyncio.run(exchange(large, max_reply_bytes=1000))


def test_a_compressed_reply_is_refused_since_its_size_is_unknown() -> None:
    async def compressed(request: bytes) -> bytes | None:
        assert b"accept-encoding: identity" in request.lower()
        return http(b"\x1f\x8b", "Content-Encoding: gzip")

    with pytest.raises(ServerError, match="compressed"):
        asyncio.run(exchange(compressed))


def test_cookies_are_given_by_the_caller_and_handed_back_but_never_kept() -> None:
    seen: list[bytes] = []

    async def cookie(request: bytes) -> bytes | None:
        seen.append(request)
        return http(b"{}", "Set-Cookie: a=1; path=/; httponly", "Set-Cookie: b=2")

    async def main() -> Reply:
        async with serving(cookie) as server, HttpTransport(max_connections=1) as client:
            deadline = Deadline.after(CLOCK, 5)
            first = await client.call(server, "POST", "/x", {}, deadline=deadline, cookies={"mine": "7"})
            await client.call(server, "POST", "/x", {}, deadline=deadline)
            return first

    assert asyncio.run(main()).cookies == {"a": "1", "b": "2"}
    assert b"mine=7" in seen[0]
    assert b"cookie" not in seen[1].lower()


def test_many_more_requests_than_a_default_pool_run_at_once() -> None:
    waiting = 0
    everyone = asyncio.Event()

    async def meet(request: bytes) -> bytes | None:
        nonlocal waiting
        waiting += 1
        if waiting == 300:
            everyone.set()
        await everyone.wait()
        return http(b"{}")

    async def main() -> None:
        async with serving(meet) as server, HttpTransport(max_connections=512) as client, asyncio.TaskGroup() as group:
            for _ in range(300):
                group.create_task(client.call(server, "POST", "/x", {}, deadline=Deadline.after(CLOCK, 20)))

    asyncio.run(main())
    assert waiting == 300


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(500, {}, b'"boom"'), 'answered HTTP 500: "boom"'),
        (Reply(200, {}, b"<html>"), "answered no JSON"),
        (Reply(200, {}, b"[1]"), "answered a JSON list, not an object"),
    ],
)
def test_a_reply_that_is_no_json_object_is_named(reply: Reply, message: str) -> None:
    with pytest.raises(ServerError, match="peer " + message):
        json_object(reply, "peer")


def test_the_message_about_a_reply_is_short_however_long_the_reply() -> None:
    with pytest.raises(ServerError) as caught:
        json_object(Reply(500, {}, b"y" * 10_000_000), "peer")
    assert len(str(caught.value)) < 400
