"""The routes of a resources server that exposes its tools over MCP."""

from typing import Any

from fastapi import FastAPI, Request, Response

from gymckpt.errors import StaleAttempt
from gymckpt.identity import EpisodeId
from gymckpt.servers.resources.mcp_tools import McpTools, Tokens, read_body
from gymckpt.servers.resources.requests import Requests
from gymckpt.servers.resources.server import Call, ResourcesServer
from gymckpt.wire.gym import MCP_PATH, MCP_SESSION_HEADER


class McpRoutes:
    """`POST /mcp`, and a session's access to it."""

    def __init__(self, server: ResourcesServer) -> None:
        self._instance = server.instance
        self._tools = McpTools(server)
        self._tokens = Tokens(server.instance)

    def access(self, session_id: str, episode: EpisodeId | None) -> dict[str, Any]:
        """`resources_tools` for the reply to a seed."""
        return self._tokens.access(session_id, episode)

    def add_to(self, app: FastAPI, requests: Requests) -> None:
        """Serve MCP. Every message passes through `requests`, as a tool call does."""

        async def post(request: Request) -> Response:
            body = await read_body(request)
            session_id, episode = self._tokens.read(request.headers.get(MCP_SESSION_HEADER))
            named = request.scope.get("state", {}).get("episode")
            if named is not None and named != episode:
                raise StaleAttempt(f"{self._instance}: the token is episode {episode}'s, the path names {named}")

            async def answer(call: Call) -> Response:
                return await self._tools.answer(call, request, body)

            response: Response = await requests.call(session_id, episode, answer, {})
            return response

        # Only POST: there is no stream of the server's own that a client could GET.
        app.add_api_route(MCP_PATH, post, methods=["POST"], response_model=None)
