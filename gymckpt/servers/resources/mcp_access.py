"""The route that gives a session's MCP access anew: after a restore its tokens are another attempt's."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from gymckpt.identity import EpisodeId
from gymckpt.participant.routes import bad_body, check_bearer
from gymckpt.roles.resources import ResourcesRole
from gymckpt.settings import CheckpointSettings
from gymckpt.wire.gym import MCP_ACCESS_PATH, McpAccessRequest

Give = Callable[[str, EpisodeId | None], dict[str, Any]]
"""`resources_tools` for a session and the attempt that it is bound to."""


def add_mcp_access(app: FastAPI, role: ResourcesRole, checkpoint: CheckpointSettings, give: Give) -> None:
    """Serve `MCP_ACCESS_PATH` to holders of the control token: never waits, since it changes nothing."""
    assert checkpoint.control_auth_token is not None
    token = checkpoint.control_auth_token.get_secret_value().encode()

    async def access(request: Request) -> Response:
        check_bearer(request, token)
        try:
            asked = McpAccessRequest.model_validate_json(await request.body())
        except ValidationError as error:
            raise bad_body(error) from error
        session = role.requests.sessions.of_episode(asked.episode_id.episode)
        return JSONResponse({"resources_tools": give(session.session_id, session.episode)})

    app.add_api_route(MCP_ACCESS_PATH, access, methods=["POST"], response_model=None, include_in_schema=False)
