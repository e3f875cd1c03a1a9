"""The sessions of one agent server: seeded, activated, closed, restored, retired."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Any

from gymckpt.errors import CheckpointConflict, StaleAttempt, UnknownSession
from gymckpt.identity import EpisodeId
from gymckpt.participant.admission import Gate
from gymckpt.participant.marks import Marks
from gymckpt.roles.agent_record import RestoredSession
from gymckpt.roles.agent_session import Activated, AgentSession, Bench
from gymckpt.roles.agent_tools import MCP, ToolServer
from gymckpt.wire.gym import AgentSessionRequest

Connect = Callable[[AgentSession], Awaitable[None]]
"""What an agent does to make a seeded session usable, for example opening a connection to its tools."""


async def connect_nothing(_: AgentSession) -> None:
    """Simple Agent needs no connection: tools are called over plain HTTP."""


class AgentSessions:
    """Sessions by key. Every entrance waits while the gate is closed, and checks the marks after the wait."""

    def __init__(self, bench: Bench, gate: Gate, marks: Marks, connect: Connect = connect_nothing) -> None:
        self._bench = bench
        self._gate = gate
        self._marks = marks
        self._connect = connect
        self._sessions: dict[str, AgentSession] = {}
        self._seeding: dict[asyncio.Event, EpisodeId] = {}

    def __iter__(self) -> Iterator[AgentSession]:
        return iter(list(self._sessions.values()))

    async def seed(self, request: AgentSessionRequest, *, restart: bool) -> AgentSession:
        """Open a session, or give the same one for the same key and episode; a new key frees the sessions of this and
        earlier attempts. Raises `StaleAttempt`, `CheckpointConflict` (the key is another episode's), `UsageError`."""
        episode = request.episode_id.episode
        await self._gate.wait_open()
        self._marks.check(episode)
        if (held := self._sessions.get(request.agent_session_id)) is not None:
            if held.episode != episode:
                raise CheckpointConflict(f"agent session {held.key[:80]!r} belongs to {held.episode}, not to {episode}")
            return held
        if any(other.episode.attempt > episode.attempt for other in self.of(episode.rollout_id)):
            raise StaleAttempt(f"a later attempt than {episode} has a session here")
        tools = ToolServer.of(request.tool_accesses, self._bench.neighbours)
        ended = asyncio.Event()
        self._seeding[ended] = episode
        try:
            with self._gate.in_flight(str(episode)):
                return await self._build(request, episode, tools, restart)
        finally:
            del self._seeding[ended]
            ended.set()

    async def _build(
        self, request: AgentSessionRequest, episode: EpisodeId, tools: ToolServer | None, restart: bool
    ) -> AgentSession:
        earlier = [s for s in self.of(episode.rollout_id) if s.episode.attempt <= episode.attempt]
        task_id = {"taskset": request.task_id.taskset, "task_id": request.task_id.task_id}
        session = AgentSession(request.agent_session_id, episode, task_id, tools, self._bench)
        if restart or (tools is not None and not await self._found_again(tools)):
            self._bench.floor.becomes_restart(session.track)
        self._sessions[session.key] = session
        try:
            await self._connect(session)
            self._marks.check(episode)
        except BaseException:
            await self._free(session)
            raise
        for old in earlier:
            await self._free(old)
        return session

    async def _found_again(self, tools: ToolServer) -> bool:
        """Whether a restored session could go on using its tools: by their name, and where a token is needed by a new
        one."""
        if not tools.known or tools.kind != MCP:
            return tools.known
        return (await self._bench.neighbours.participation(tools.server.instance)).renews_mcp

    async def activate(
        self,
        key: str | None,
        episode: EpisodeId | None,
        index: int | None,
        params: dict[str, Any],
        *,
        restart: bool,
        boundaries: int,
    ) -> Activated:
        """See `AgentSession.activate`. Raises `UnknownSession` and `StaleAttempt` too."""
        session = await self._entered(key, episode)
        if restart and not session.track.will_restart:
            self._bench.floor.becomes_restart(session.track)
        return await session.activate(index, params, boundaries)

    async def close(self, key: str, episode: EpisodeId) -> dict[str, str]:
        """Free a session, and give the tools' cookies back. Raises as `activate` does."""
        session = await self._entered(key, episode)
        cookies = session.tool_cookies
        await self._free(session)
        return cookies

    def find(self, key: str | None, episode: EpisodeId | None) -> AgentSession:
        """The session called `key` (by default the episode's only one); raises `UnknownSession` or `StaleAttempt`."""
        session = self._sessions.get(key) if key is not None else None
        if session is None and episode is not None:
            self._marks.check(episode)
            session = next((s for s in self.of(episode.rollout_id) if s.episode == episode), None) if not key else None
        if session is None:
            raise UnknownSession(f"no agent session {str(key)[:80]!r} of episode {episode} is held here")
        self._marks.check(session.episode)
        if episode is not None and episode != session.episode:
            raise StaleAttempt(f"agent session {session.key[:80]!r} belongs to {session.episode}, not to {episode}")
        return session

    def of(self, rollout_id: str) -> list[AgentSession]:
        """The sessions of one rollout."""
        return [session for session in self if session.episode.rollout_id == rollout_id]

    def install(self, episode: EpisodeId, restored: RestoredSession) -> None:
        """Put a checked session under `episode`."""
        tools = restored.session.tools
        server = None
        if tools is not None:
            server = ToolServer(self._bench.neighbours.server(tools.server), dict(tools.cookies), kind=tools.kind)
        session = AgentSession(restored.key, episode, restored.session.task_id, server, self._bench, restored)
        self._sessions[session.key] = session

    async def drop_restored(self, keep: Collection[EpisodeId]) -> None:
        """Free what was restored, never used, and is not in `keep`."""
        for session in self:
            if session.unclaimed and session.episode not in keep:
                await self._free(session)

    async def retire(self, episode: EpisodeId) -> None:
        """Free the sessions of this and every earlier attempt, those that are being seeded too."""
        covered = [
            ended
            for ended, seeding in self._seeding.items()
            if seeding.rollout_id == episode.rollout_id and seeding.attempt <= episode.attempt
        ]
        for ended in covered:
            await ended.wait()
        for session in self.of(episode.rollout_id):
            if session.episode.attempt <= episode.attempt:
                await self._free(session)

    def abandon(self) -> None:
        """Stop everything without waiting: the process ends."""
        for session in self:
            session.abandon()

    async def _entered(self, key: str | None, episode: EpisodeId | None) -> AgentSession:
        self.find(key, episode)
        await self._gate.wait_open()
        session = self.find(key, episode)
        session.unclaimed = False
        return session

    async def _free(self, session: AgentSession) -> None:
        await session.stop()
        session.track.end()
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]
