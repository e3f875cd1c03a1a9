"""Gym's own tools over MCP, on a server that takes part in checkpoints.

Gym's session token names the session alone. Ours is Gym's with the attempt added, which Gym's own reader passes over:
so a client of a dead attempt is refused although its session was restored.
"""

import importlib
from typing import Any

from fastapi import FastAPI
from itsdangerous import BadSignature, URLSafeSerializer

from gymckpt import jsoncodec
from gymckpt.errors import InvalidRolloutId
from gymckpt.identity import EpisodeId
from gymckpt.integrations.nemo_gym.bodies import object_in
from gymckpt.integrations.nemo_gym.exchange import Answer
from gymckpt.participant.prefix import Scope
from gymckpt.wire.gym import MCP_PATH, MCP_SESSION_HEADER

SALT = "nemo-gym-mcp-session-token"
TOOLS_FIELD, FLAT_FIELD = "resources_tools", "mcp"
"""Where a seed's reply carries the access: typed, and as Gym's flat replies do."""
NARROWING = "mcp_allowed_tools_for_session"


def expose(server: Any, app: FastAPI) -> bool:
    """Let Gym expose the tools of `app` as its configuration says, and not once more; whether it did.

    Gym does so only on an app that nobody has added anything to, so this comes before everything else.
    """
    if not getattr(server.config, "expose_tools_over_mcp", False):
        return False
    importlib.import_module("nemo_gym.mcp_auto_exposure").maybe_auto_expose(server, app)
    server.config.expose_tools_over_mcp = False
    return True


class McpTokens:
    """Reads and makes the session tokens of one server; `cookie` is the key that Gym signs them with."""

    def __init__(self, server: Any, cookie: str) -> None:
        self._instance: str = server.config.name
        self._signer = URLSafeSerializer(cookie, salt=SALT)
        self.renewable = _unnarrowed(type(server))
        """Whether a token can be made without the seed's body: the server allows every session the same tools."""

    def access(self, session_id: str, episode: EpisodeId | None) -> dict[str, Any]:
        """`resources_tools` for a session, made anew."""
        headers = {MCP_SESSION_HEADER: self._signed({"sid": session_id, "tools": None}, episode)}
        return {"server_name": self._instance, "url_path": MCP_PATH, "transport": "http", "headers": headers}

    def named(self, scope: Scope) -> tuple[str | None, EpisodeId | None]:
        """Session and attempt of the token that a request carries; nothing without a validly signed one."""
        wanted = MCP_SESSION_HEADER.lower().encode()
        token = next((value for name, value in scope["headers"] if name.lower() == wanted), None)
        try:
            claims = self._signer.loads(token) if token is not None else None
            session_id, key = (claims.get("sid"), claims.get("episode")) if isinstance(claims, dict) else (None, None)
            episode = EpisodeId.parse(key) if isinstance(key, str) else None
        except (BadSignature, InvalidRolloutId):
            return None, None
        return (session_id if isinstance(session_id, str) and session_id else None), episode

    def bound(self, answer: Answer, episode: EpisodeId | None, *, typed: bool) -> Answer:
        """A seed's reply with its token naming `episode`; `typed`: the access stands where a typed reply has it."""
        fields = object_in(answer.body)
        for name in (TOOLS_FIELD, FLAT_FIELD):
            access = fields.get(name)
            if isinstance(access, dict) and isinstance(headers := access.get("headers"), dict):
                again = {key: self._rebound(value, episode) for key, value in headers.items()}
                fields[name] = {**access, "headers": again}
        if typed and fields.get(FLAT_FIELD) is not None and fields.get(TOOLS_FIELD) is None:
            fields[TOOLS_FIELD] = fields.pop(FLAT_FIELD)
        return answer.with_body(jsoncodec.dumps(fields))

    def _rebound(self, token: Any, episode: EpisodeId | None) -> Any:
        try:
            claims = self._signer.loads(token)
        except BadSignature:
            return token
        return self._signed(claims, episode)

    def _signed(self, claims: dict[str, Any], episode: EpisodeId | None) -> str:
        named = {} if episode is None else {"episode": episode.capture_key}
        token = self._signer.dumps({**claims, **named})
        return token if isinstance(token, str) else token.decode()


def _unnarrowed(server_class: type) -> bool:
    owner = next((base for base in server_class.__mro__ if NARROWING in vars(base)), None)
    return owner is None or owner.__name__ == "SimpleResourcesServer"
