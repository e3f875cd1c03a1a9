"""One request to a wrapped app, asked as a whole: its body was read before, its answer is held until it may go out."""

import asyncio
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gymckpt.errors import UsageError
from gymckpt.participant.prefix import App, Receive, Scope, Send

MAX_BODY_BYTES = 256 << 20

Header = tuple[bytes, bytes]


class BodyTooLarge(UsageError):
    """A request's body is beyond every bound."""

    code = "request_too_large"
    http_status = 413


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole reply."""

    status: int
    headers: tuple[Header, ...]
    body: bytes

    def with_headers(self, more: Sequence[tuple[str, str]]) -> "Answer":
        """The same reply with `more` headers at its end."""
        return replace(self, headers=(*self.headers, *((name.encode(), value.encode()) for name, value in more)))

    def with_body(self, body: bytes) -> "Answer":
        """The same reply with another body."""
        kept = tuple(header for header in self.headers if header[0].lower() != b"content-length")
        return replace(self, headers=(*kept, (b"content-length", str(len(body)).encode())), body=body)

    async def send(self, send: Send) -> None:
        """Give it to the caller."""
        await send({"type": "http.response.start", "status": self.status, "headers": list(self.headers)})
        await send({"type": "http.response.body", "body": self.body})


class Refused(Exception):
    """The wrapped app answered with an error; the caller gets that answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"HTTP {answer.status}")
        self.answer = answer


async def read_body(receive: Receive) -> bytes:
    """The request's body; raises `BodyTooLarge`. What a caller that goes away has not sent is not waited for."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return bytes(body)


async def ask(app: App, scope: Scope, body: bytes) -> Answer:
    """The whole answer of `app` to a request with `body`. Raises what the app raises."""
    status, headers, parts = 500, (), [b""]
    given = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            # Whoever waits for the caller to leave waits until the answer is there, and is cancelled then.
            await asyncio.Event().wait()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], tuple(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return Answer(status, headers, b"".join(parts))


def with_content_length(scope: Scope, body: bytes) -> Scope:
    """`scope` for a request whose body is `body`."""
    kept = [(n, v) for n, v in scope["headers"] if n.lower() not in (b"content-length", b"transfer-encoding")]
    return {**scope, "headers": [*kept, (b"content-length", str(len(body)).encode())]}


def post_scope(path: str) -> Scope:
    """A request of our own to a wrapped app."""
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }
