"""How requests reach a resources server's code: through its role, or directly where no checkpoints are taken."""

import uuid
from typing import Any, Protocol

from gymckpt.errors import UnknownSession
from gymckpt.identity import EpisodeId
from gymckpt.jsoncodec import Json
from gymckpt.roles.resources import ResourcesRole
from gymckpt.roles.resources_sessions import Session
from gymckpt.servers.resources.server import Call, ResourcesServer, Seed, Tool, Verification
from gymckpt.wire.control import HEADER_COHORT, HEADER_RESTART, HEADER_VERIFY


class Requests(Protocol):
    """The four kinds of request. `episode` is what the request itself names, by path or body."""

    async def seed(
        self, episode: EpisodeId | None, caller_id: str | None, task_data: dict[str, Any]
    ) -> tuple[str, dict[str, str]]:
        """The session's id, and headers for the reply."""
        ...

    async def call(
        self, session_id: str | None, episode: EpisodeId | None, tool: Tool, arguments: dict[str, Any]
    ) -> Json:
        """What the tool answers."""
        ...

    async def verify(self, session_id: str | None, episode: EpisodeId | None, body: dict[str, Any]) -> dict[str, Any]:
        """The verdict's own fields."""
        ...

    async def close(self, session_id: str | None, episode: EpisodeId | None, caller_id: str | None) -> None:
        """End the session."""
        ...


class DirectRequests:
    """Nothing is kept about any session; the server's own code knows which ones it has."""

    def __init__(self, server: ResourcesServer) -> None:
        self._server = server

    async def seed(
        self, episode: EpisodeId | None, caller_id: str | None, task_data: dict[str, Any]
    ) -> tuple[str, dict[str, str]]:
        """See `Requests.seed`."""
        session_id = str(uuid.uuid4())
        await self._server.seed_session(Seed(session_id, episode, task_data))
        return session_id, {}

    async def call(
        self, session_id: str | None, episode: EpisodeId | None, tool: Tool, arguments: dict[str, Any]
    ) -> Json:
        """See `Requests.call`."""
        if session_id is None:
            raise UnknownSession(f"{self._server.instance}: the request carries no session cookie")
        return await tool(Call(session_id, episode), **arguments)

    async def verify(self, session_id: str | None, episode: EpisodeId | None, body: dict[str, Any]) -> dict[str, Any]:
        """See `Requests.verify`."""
        return await self._server.verify(Verification(session_id, body, episode))

    async def close(self, session_id: str | None, episode: EpisodeId | None, caller_id: str | None) -> None:
        """See `Requests.close`."""
        if session_id is not None:
            await self._server.retire_session_state(session_id)


class GuardedRequests:
    """Every request passes through the role, which makes it wait, refuses it, or stops it."""

    def __init__(self, server: ResourcesServer, role: ResourcesRole) -> None:
        self._server = server
        self._requests = role.requests

    async def seed(
        self, episode: EpisodeId | None, caller_id: str | None, task_data: dict[str, Any]
    ) -> tuple[str, dict[str, str]]:
        """See `Requests.seed`. A session without an episode is said to be a restart: no checkpoint can name it."""

        async def work(session: Session) -> None:
            await self._server.seed_session(Seed(session.session_id, episode, task_data))

        session = await self._requests.seed(str(uuid.uuid4()), episode, caller_id, work)
        headers: dict[str, str] = {HEADER_VERIFY: self._server.checkpoint_verify}
        if self._server.checkpoint_mode == "restart_only" or episode is None:
            headers[HEADER_RESTART] = "1"
        if self._server.compares_cohorts:
            headers[HEADER_COHORT] = "1"
        return session.session_id, headers

    async def call(
        self, session_id: str | None, episode: EpisodeId | None, tool: Tool, arguments: dict[str, Any]
    ) -> Json:
        """See `Requests.call`."""

        async def work(session: Session) -> Json:
            return await tool(Call(session.session_id, session.episode), **arguments)

        return await self._requests.call(session_id, episode, work)

    async def verify(self, session_id: str | None, episode: EpisodeId | None, body: dict[str, Any]) -> dict[str, Any]:
        """See `Requests.verify`."""

        async def work(session: Session | None) -> dict[str, Any]:
            asked = Verification(session.session_id, body, session.episode) if session else Verification(None, body)
            return await self._server.verify(asked)

        return await self._requests.verify(session_id, episode, work)

    async def close(self, session_id: str | None, episode: EpisodeId | None, caller_id: str | None) -> None:
        """See `Requests.close`."""
        await self._requests.close_session(session_id, episode, caller_id)
