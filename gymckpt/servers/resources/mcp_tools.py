"""A server's tools over MCP (streamable HTTP), for agents that speak it: the same tools under the same rules.

A session is named by a signed token that comes with its seed, in Gym's own form (`resources_tools`). One POST is one
unit of admission: it waits out a checkpoint, is counted while it runs, and ends with its session. A token is good for
one attempt in one server process. After a restore, whoever holds the control token asks for a new one, and a new client
goes on with the session; a client of the dead attempt is refused.
"""

import asyncio
import inspect
import secrets
from collections.abc import Mapping, MutableMapping
from typing import Any

import anyio
import mcp.types as protocol
from fastapi import Request, Response
from itsdangerous import BadSignature, URLSafeSerializer
from mcp.server.lowlevel import Server
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.transport_security import TransportSecuritySettings

from gymckpt import jsoncodec
from gymckpt.errors import GymckptError, Unauthorized
from gymckpt.identity import EpisodeId
from gymckpt.jsoncodec import Json
from gymckpt.roles.resources_sessions import cancel_once
from gymckpt.servers.bodies import BodyTooLarge
from gymckpt.servers.resources.server import Call, ResourcesServer, Tool
from gymckpt.wire.gym import MCP_PATH, MCP_SESSION_HEADER

MAX_BODY_BYTES = 4 << 20
"""The library's own bound: a POST is read as JSON on the event loop."""

_CALL = "gymckpt_call"


class Tokens:
    """Signs and reads session tokens. The key is new in every process: a token never outlives the one that gave it."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._signer = URLSafeSerializer(secrets.token_hex(32), salt="mcp-session")

    def access(self, session_id: str, episode: EpisodeId | None) -> dict[str, Any]:
        """`resources_tools` of a seed's reply: where the tools are, and the header that names the session."""
        token = self._signer.dumps([session_id, episode.capture_key if episode else None])
        headers = {MCP_SESSION_HEADER: token if isinstance(token, str) else token.decode()}
        return {"server_name": self._server, "url_path": MCP_PATH, "transport": "http", "headers": headers}

    def read(self, token: str | None) -> tuple[str, EpisodeId | None]:
        """Session and attempt of a token; raises `Unauthorized`."""
        try:
            session_id, key = self._signer.loads(token or "")
        except BadSignature:
            raise Unauthorized(
                f"{self._server}: no such session token ({MCP_SESSION_HEADER})",
                hint="the server was started again, or the token is missing",
            ) from None
        return session_id, EpisodeId.parse(key) if key is not None else None


class McpTools:
    """Answers one MCP message at a time, each in a connection of the library's that lives as long as the message."""

    def __init__(self, server: ResourcesServer) -> None:
        self._tools = dict(server.tools())
        self._listed = _listed(server, self._tools)
        self._server: Server[Any, Any] = Server(server.instance)
        self._server.request_handlers[protocol.ListToolsRequest] = self._list
        self._server.request_handlers[protocol.CallToolRequest] = self._call

    async def answer(self, call: Call, request: Request, body: bytes) -> Response:
        """The reply to the POST `request` of the session in `call`. Cancelled, it stops the tool and waits for it."""
        transport = StreamableHTTPServerTransport(
            mcp_session_id=None,
            is_json_response_enabled=True,
            # Agents reach a server under names of the cluster's own; what admits them is the token.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )
        reply = _Captured()
        scope = {**request.scope, "state": {**request.scope.get("state", {}), _CALL: call}}
        async with anyio.create_task_group() as tasks, transport.connect() as (incoming, outgoing):
            options = self._server.create_initialization_options()
            tasks.start_soon(lambda: self._server.run(incoming, outgoing, options, stateless=True))
            await transport.handle_request(scope, _body(body), reply.send)
            await transport.terminate()
        return Response(bytes(reply.body), reply.status, reply.headers)

    async def _list(self, _: protocol.ListToolsRequest) -> protocol.ServerResult:
        return protocol.ServerResult(protocol.ListToolsResult(tools=self._listed))

    async def _call(self, asked: protocol.CallToolRequest) -> protocol.ServerResult:
        name, arguments = asked.params.name, asked.params.arguments or {}
        tool = self._tools.get(name)
        if tool is None:
            return _result({"error": f"there is no tool {name[:128]!r}"}, is_error=True)
        try:
            inspect.signature(tool).bind(None, **arguments)
        except TypeError as error:
            return _result({"error": f"{name}: {error}"}, is_error=True)
        request = self._server.request_context.request
        assert request is not None
        call: Call = request.scope["state"][_CALL]
        try:
            return _result(await _once(asyncio.ensure_future(tool(call, **arguments))))
        except GymckptError as error:
            return _result({"error": {"code": error.code, "detail": error.detail}}, is_error=True)


async def _once(work: "asyncio.Future[Json]") -> Json:
    """What `work` gives. The library cancels again and again until a task has ended; the tool sees one cancel."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if isinstance(work, asyncio.Task):
            cancel_once(work)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([work])
        raise


def _listed(server: ResourcesServer, tools: Mapping[str, Tool]) -> list[protocol.Tool]:
    described = {name: server.describe_tool(name, tool) for name, tool in tools.items()}
    return [
        protocol.Tool(name=name, description=about.description, inputSchema=about.parameters)
        for name, about in described.items()
    ]


def _result(value: Json, *, is_error: bool = False) -> protocol.ServerResult:
    """What the tool's own route would answer, as text; an object also as it is."""
    text = protocol.TextContent(type="text", text=jsoncodec.dumps(value).decode())
    structured = value if isinstance(value, dict) and not is_error else None
    return protocol.ServerResult(
        protocol.CallToolResult(content=[text], structuredContent=structured, isError=is_error)
    )


class _Captured:
    """A reply, taken from the library instead of sent."""

    def __init__(self) -> None:
        self.status = 500
        self.headers: dict[str, str] = {}
        self.body = bytearray()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            named = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
            self.headers = {name: value for name, value in named.items() if name != "content-length"}
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")


def _body(data: bytes) -> Any:
    given = False

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            return {"type": "http.disconnect"}
        given = True
        return {"type": "http.request", "body": data, "more_body": False}

    return receive


async def read_body(request: Request) -> bytes:
    """The POST's body; raises `BodyTooLarge`."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"an MCP message is larger than {MAX_BODY_BYTES} bytes")
    return bytes(data)
