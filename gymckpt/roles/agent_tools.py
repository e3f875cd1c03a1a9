"""Tool calls of an agent: what the model asks for, made over HTTP with the session's cookies, or over MCP."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from gymckpt import jsoncodec
from gymckpt.errors import UsageError
from gymckpt.identity import EpisodeId
from gymckpt.ports import ServerRef
from gymckpt.roles.agent_mcp import McpCaller
from gymckpt.roles.neighbours import Neighbourhood, failure, refusal
from gymckpt.wire.gym import MCP_PATH, ToolAccess, rollout_path

ToolKind = Literal["direct_http", "mcp"]
DIRECT_HTTP: ToolKind = "direct_http"
MCP: ToolKind = "mcp"

RESERVED_ROUTES = frozenset(
    {"run", "seed_session", "verify", "close_session", "aggregate_metrics", "docs", "redoc", "mcp"}
)
"""Routes of a resources server that are no tools: a model that asks for one of them reaches nothing."""

_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class ToolServer:
    """The one server whose tools a session uses. A record names it and holds the cookies, never its address."""

    server: ServerRef
    cookies: dict[str, str]
    """As the session was seeded with; those of a running loop are in the loop's state."""
    known: bool = True
    """Whether the name is in our own configuration: without that a restore could not find the server again."""
    kind: ToolKind = DIRECT_HTTP
    path: str = MCP_PATH
    """Of an MCP server."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of an MCP server, with the session's token: never in a record."""

    @classmethod
    def of(cls, accesses: list[ToolAccess], neighbours: Neighbourhood) -> "ToolServer | None":
        """The tool server that a seed names, reached over plain HTTP if that is offered, else over MCP; None without
        tools. Raises `UsageError` for what cannot be used."""
        if other := [access.kind for access in accesses if access.kind not in (DIRECT_HTTP, MCP) and access.required]:
            raise UsageError(f"tool access of kind {other[0][:80]!r} is not supported: only {DIRECT_HTTP} and {MCP}")
        for kind in (DIRECT_HTTP, MCP):
            offered = [access for access in accesses if access.kind == kind]
            if len(offered) > 1:
                raise UsageError(f"{len(offered)} tool accesses of kind {kind}: a session can use one")
            if offered:
                return cls._direct(offered[0], neighbours) if kind == DIRECT_HTTP else cls._mcp(offered[0], neighbours)
        return None

    @classmethod
    def _direct(cls, access: ToolAccess, neighbours: Neighbourhood) -> "ToolServer":
        instance = access.name.removesuffix(f".{DIRECT_HTTP}")
        known = neighbours.servers.get(instance)
        url = (access.base_url or "").rstrip("/") or (known.url if known else "")
        if not url:
            raise UsageError(f"tool access {access.name[:160]!r} has no base_url, and no server of that name is known")
        # Headers may carry a token; a session that needs them could not be captured.
        return cls(ServerRef(instance, url), dict(access.cookies), known is not None and not access.headers)

    @classmethod
    def _mcp(cls, access: ToolAccess, neighbours: Neighbourhood) -> "ToolServer":
        connection = access.connection
        if connection is None or connection.transport != "streamable_http":
            raise UsageError(f"tool access {access.name[:160]!r} has no connection over streamable_http")
        url = urlsplit(connection.url)
        server = ServerRef(access.name, f"{url.scheme}://{url.netloc}")
        known = access.name in neighbours.servers
        return cls(server, {}, known, MCP, url.path or MCP_PATH, connection.headers)


@dataclass(frozen=True, slots=True)
class ToolCaller:
    """Makes the tool calls of one session."""

    neighbours: Neighbourhood
    server: ServerRef
    episode: EpisodeId
    timeout_s: float
    mcp: McpCaller | None = None
    """Where they are made over MCP."""

    @classmethod
    def of(cls, tools: ToolServer, neighbours: Neighbourhood, episode: EpisodeId, timeout_s: float) -> "ToolCaller":
        """For the session of `episode`."""
        mcp = None
        if tools.kind == MCP:
            mcp = McpCaller(neighbours, tools.server, tools.path, tools.headers, episode, timeout_s)
        return cls(neighbours, tools.server, episode, timeout_s, mcp)

    async def round(
        self, calls: list[dict[str, Any]], cookies: dict[str, str]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The outputs of `calls`, one after the other, and the cookies afterwards.

        What a tool answers, errors included, is shown to the model. A refusal of the control plane and a broken
        connection are not: they raise.
        """
        outputs: list[dict[str, Any]] = []
        for call in calls:
            text, cookies = await self._call(call, cookies)
            outputs.append({"type": "function_call_output", "call_id": call.get("call_id"), "output": text})
        return outputs, cookies

    async def _call(self, call: dict[str, Any], cookies: dict[str, str]) -> tuple[str, dict[str, str]]:
        name = call.get("name")
        if not isinstance(name, str) or not _TOOL_NAME.match(name) or name in RESERVED_ROUTES:
            return _error(f"there is no tool {str(name)[:128]!r}"), cookies
        try:
            arguments = jsoncodec.loads(call.get("arguments") or "{}")
        except ValueError as error:
            return _error(f"the arguments of {name} are no JSON: {error}"), cookies
        if not isinstance(arguments, dict):
            return _error(f"the arguments of {name} are not a JSON object"), cookies
        if self.mcp is not None:
            return await self.mcp.call(name, arguments), cookies
        path = await self._path(f"/{name}")
        reply = await self.neighbours.post(self.server, path, arguments, timeout_s=self.timeout_s, cookies=cookies)
        if reply.status == 409 and refusal(reply) is not None:
            raise failure(reply, f"tool {name} on {self.server.instance}")
        return reply.body.decode("utf-8", "replace"), {**cookies, **reply.cookies}

    async def _path(self, route: str) -> str:
        # A restored session keeps its cookie. The attempt in the path is what tells the server that a call which was
        # still on its way when the attempt died is none of its successor's.
        if self.server.instance not in self.neighbours.servers:
            return route
        fenced = (await self.neighbours.participation(self.server.instance)).fences
        return rollout_path(self.episode, route) if fenced else route


def _error(text: str) -> str:
    return jsoncodec.dumps({"error": text}).decode()
