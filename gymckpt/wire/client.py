"""The one HTTP client: httpx's messages on its aiohttp transport, with explicit limits.

Requests go to the transport itself. What `httpx.AsyncClient` adds to them (redirects, cookies, proxies, authorization,
event hooks) is not wanted here, and costs more than all the rest of a call.
"""

import asyncio
import errno
import functools
import ssl
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http.cookies import CookieError, SimpleCookie
from types import TracebackType
from typing import Any, Self

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from gymckpt import jsoncodec
from gymckpt.errors import DeadlinePassed, NotSent, ServerError
from gymckpt.ports import Deadline, Reply, ServerRef

MAX_REPLY_BYTES = 256 << 20
MAX_RETRY_AFTER_S = 600.0
KEEPALIVE_S = 2.0
"""Idle connections are dropped after this; every server we meet keeps them longer, so none is cut under a request."""
_PLAIN = httpx.Headers({"accept-encoding": "identity"})
_JSON = httpx.Headers({"accept-encoding": "identity", "content-type": "application/json"})


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    # Building one costs tens of milliseconds, so every client of the process shares it.
    return httpx.create_ssl_context()


class HttpTransport:
    """`ports.Transport` over real sockets. One for each purpose (data, control), so that none waits for another.

    Used as an async context manager, or closed with `aclose`.
    """

    def __init__(self, *, max_connections: int, max_reply_bytes: int = MAX_REPLY_BYTES) -> None:
        self._max_reply_bytes = max_reply_bytes
        self._max_connections = max_connections
        self._transport = AiohttpTransport(verify=_ssl_context(), client=self._session)

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=self._max_connections, keepalive_timeout=KEEPALIVE_S, ssl=_ssl_context(), ttl_dns_cache=300
        )
        return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False)

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
        where = f"{method} {server.url}{path} ({server.instance})"
        content = body if isinstance(body, bytes) or body is None else jsoncodec.dumps(body)
        sent = _JSON if content is not None else _PLAIN
        if headers or cookies:
            sent = httpx.Headers(sent)
            sent.update(headers)
        if cookies:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await self._exchange(where, method, server.url + path, content, sent)
        except TimeoutError:
            raise DeadlinePassed(f"{where} did not answer before its deadline") from None
        except httpx.InvalidURL as error:
            raise NotSent(f"{where}: {error}") from error
        except httpx.HTTPError as error:
            if _was_refused(error):
                raise NotSent(f"{where} refused the connection") from error
            raise ServerError(f"{where}: the connection broke ({type(error).__name__})") from error
        except (aiohttp.ClientError, ValueError) as error:
            # What is no HTTP at all: aiohttp says so in several ways, and the transport passes some on as they are.
            raise ServerError(f"{where} answered what is no HTTP ({type(error).__name__})") from error

    async def _exchange(
        self, where: str, method: str, url: str, content: bytes | None, headers: httpx.Headers
    ) -> Reply:
        # Given as streams, bodies pass httpx as they are: aiohttp adds what it has to say of their length and host.
        request = httpx.Request(method, _url(url), headers=headers, stream=httpx.ByteStream(content or b""))
        request.read()
        response = await self._transport.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            read, cookies = _headers(response.headers.raw)
            if read.get("content-encoding", "identity") != "identity":
                raise ServerError(f"{where} compressed its reply although asked not to")
            chunks: list[bytes] = []
            size_bytes = 0
            async for chunk in response.stream:
                chunks.append(chunk)
                size_bytes += len(chunk)
                if size_bytes > self._max_reply_bytes:
                    raise ServerError(f"{where} sent more than {self._max_reply_bytes} bytes")
            return Reply(response.status_code, read, b"".join(chunks), cookies)
        finally:
            await response.stream.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _was_refused(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, aiohttp.ClientConnectorDNSError):
            return True
        if isinstance(cause, aiohttp.ClientConnectorError):
            return cause.os_error.errno == errno.ECONNREFUSED
        cause = cause.__cause__
    return False


@functools.lru_cache(maxsize=1024)
def _url(url: str) -> httpx.URL:
    # Parsing one takes longer than sending it; the same few are asked again and again.
    return httpx.URL(url)


def _headers(raw: list[tuple[bytes, bytes]]) -> tuple[dict[str, str], dict[str, str]]:
    """The headers, one line a name, and the cookies that they set."""
    found: dict[str, str] = {}
    cookies: dict[str, str] = {}
    for raw_name, raw_value in raw:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        found[name] = f"{found[name]}, {value}" if name in found else value
        if name == "set-cookie":
            with suppress(CookieError):
                cookies.update({key: morsel.value for key, morsel in SimpleCookie(value).items()})
    return found, cookies


def json_object(reply: Reply, where: str) -> dict[str, Any]:
    """The JSON object in a 2xx reply; raises `ServerError` that says what came instead (cut short, no payload)."""
    if not 200 <= reply.status < 300:
        raise ServerError(f"{where} answered HTTP {reply.status}: {excerpt(reply)}")
    try:
        value = jsoncodec.loads(reply.body)
    except ValueError as error:
        raise ServerError(f"{where} answered no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ServerError(f"{where} answered a JSON {type(value).__name__}, not an object")
    return value


def excerpt(reply: Reply, limit: int = 200) -> str:
    """The beginning of a reply's body, for a message to a person."""
    text = reply.body[: limit * 4].decode("utf-8", "replace")
    return text if len(text) <= limit else text[:limit] + "…"


def retry_after_s(reply: Reply, now: float) -> float | None:
    """How long the reply asks to be left alone; None if it does not say, or nothing readable. `now` is unix time."""
    value = reply.headers.get("retry-after")
    if value is None:
        return None
    try:
        wait_s = float(value) if value.strip().isdecimal() else parsedate_to_datetime(value).timestamp() - now
    except (ValueError, OverflowError):
        return None
    return min(max(wait_s, 0.0), MAX_RETRY_AFTER_S)
