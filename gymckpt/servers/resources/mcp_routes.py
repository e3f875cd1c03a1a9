"""The routes of a resources server that exposes its tools over MCP."""

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from gymckpt.errors import StaleAttempt
from gymckpt.identity import EpisodeId
from gymckpt.participant.routes import check_bearer
from gymckpt.roles.resources import ResourcesRole
from gymckpt.servers.bodies import BadBody, checked
from gymckpt.servers.resources.mcp_tools import McpTools, Tokens, read_body
from gymckpt.servers.resources.requests import Requests
from gymckpt.servers.resources.server import Call, ResourcesServer
from gymckpt.settings import CheckpointSettings
from gymckpt.wire.gym import MCP_ACCESS_PATH, MCP_PATH, MCP_SESSION_HEADER, McpAccessRequest


class McpRoutes:
    """`POST /mcp`, and where checkpoints are taken the route that gives a session's access anew."""

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

    def add_access_to(self, app: FastAPI, role: ResourcesRole, checkpoint: CheckpointSettings) -> None:
        """Serve `MCP_ACCESS_PATH`: never waits, since it changes nothing."""
        assert checkpoint.control_auth_token is not None
        token = checkpoint.control_auth_token.get_secret_value().encode()

        async def access(request: Request) -> Response:
            check_bearer(request, token)
            try:
                asked = checked(McpAccessRequest, await request.json())
            except ValueError as error:
                raise BadBody(f"the body is no JSON: {error}") from error
            session = role.requests.sessions.of_episode(asked.episode_id.episode)
            return JSONResponse({"resources_tools": self.access(session.session_id, session.episode)})

        app.add_api_route(MCP_ACCESS_PATH, access, methods=["POST"], response_model=None)
