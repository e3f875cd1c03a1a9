"""An agent session: seeded once, then one activation after another, each with an index that its caller chooses."""

import asyncio
from dataclasses import dataclass
from typing import Any

from gymckpt.episodes.driver import Driver
from gymckpt.episodes.floor import Floor
from gymckpt.episodes.steps import Track
from gymckpt.episodes.time_limit import TimeLimit
from gymckpt.errors import ActivationOutOfOrder, CheckpointFailed
from gymckpt.identity import EpisodeId
from gymckpt.roles.agent_loop import LOOP, Loop, LoopSetting, LoopState, as_items
from gymckpt.roles.agent_record import RestoredSession, SessionState, SessionTools, snapshot
from gymckpt.roles.agent_tools import ToolCaller, ToolServer
from gymckpt.roles.neighbours import Neighbourhood

ACTIVATE = "activate"
RETURN = "return"


@dataclass(frozen=True, slots=True)
class Bench:
    """What every session and episode of one agent server works with."""

    neighbours: Neighbourhood
    floor: Floor
    model: str
    model_timeout_s: float
    tool_timeout_s: float
    max_steps: int | None

    def setting(self, track: Track, tools: ToolServer | None) -> LoopSetting:
        """For one loop."""
        caller = ToolCaller.of(tools, self.neighbours, track.episode, self.tool_timeout_s) if tools else None
        return LoopSetting.prefixed(
            track,
            neighbours=self.neighbours,
            model=self.neighbours.server(self.model),
            tools=caller,
            model_timeout_s=self.model_timeout_s,
            max_steps=self.max_steps,
        )


@dataclass(frozen=True, slots=True)
class Activated:
    """The reply to an activation, with what its headers say."""

    response: dict[str, Any]
    boundaries: int
    turns: int
    model_cookies: dict[str, str]


class AgentSession:
    """One session. Its track stands on the floor from the seed to the close."""

    def __init__(
        self,
        key: str,
        episode: EpisodeId,
        task_id: dict[str, Any],
        tools: ToolServer | None,
        bench: Bench,
        restored: RestoredSession | None = None,
    ) -> None:
        self.key = key
        self.episode = episode
        self.tools = tools
        self.unclaimed = restored is not None
        """Restored, and not yet used by the replacement."""
        self._bench = bench
        named = SessionTools(server=tools.server.instance, cookies=tools.cookies, kind=tools.kind) if tools else None
        self._session = SessionState(task_id=task_id, tools=named)
        self._loop = restored.loop if restored else None
        self._driver: Driver[Activated] | None = None
        limit = TimeLimit(bench.neighbours.clock, None)
        point = restored.point if restored else None
        self.track = Track(bench.floor, bench.neighbours.clock, episode, limit, point=point)
        if restored is None:
            self._record(None, ACTIVATE)

    @property
    def completed(self) -> int | None:
        """Index of the last completed activation."""
        return self._loop.activation if self._loop is not None and self._loop.done else None

    @property
    def expected(self) -> tuple[int, ...]:
        """Indexes that may run now: the one that was begun, or the next. Callers count from 1, some from 0."""
        if self._loop is None:
            return (1, 0)
        return (self._loop.activation + 1 if self._loop.done else self._loop.activation,)

    @property
    def tool_cookies(self) -> dict[str, str]:
        """The tools' cookies as they are now: whoever seeded the session verifies with them."""
        if self._loop is not None:
            return self._loop.tool_cookies
        return dict(self.tools.cookies) if self.tools else {}

    async def activate(self, index: int | None, params: dict[str, Any], boundaries: int) -> Activated:
        """Run activation `index` (None: the next one), or give the stored reply of the one that completed last.

        A caller that goes away does not end it. Raises `ActivationOutOfOrder`, and whatever makes the loop fail; then
        the same index may be sent again, and goes on from the last boundary.
        """
        index = self.expected[0] if index is None else index
        if self._driver is not None and self._driver.in_steps:
            raise ActivationOutOfOrder(f"session of {self.episode}: an activation is running, {index} cannot start")
        if self._loop is not None and index == self.completed:
            return self._stored(self._loop)
        if index not in self.expected:
            raise ActivationOutOfOrder(f"session of {self.episode}: activation {index}; {self.expected[0]} is next")
        self._driver = Driver(f"activation of {self.episode}", lambda: self._run(index, params, boundaries))
        return await asyncio.shield(self._driver.reply)

    async def stop(self) -> None:
        """Cancel a running activation once; return when it has stopped."""
        if self._driver is not None:
            self._driver.cancel()
            await self._driver.gone()

    def abandon(self) -> None:
        """Stop without waiting: the process ends."""
        if self._driver is not None:
            self._driver.abandon()

    async def _run(self, index: int, params: dict[str, Any], boundaries: int) -> Activated:
        await self.track.park()
        self.track.counted(boundaries)
        state = self._begin(index, params)
        setting = self._bench.setting(self.track, self.tools)
        state = await Loop(state, params, self.track, setting, record=self._record, following=RETURN).run()
        # The reply is stored by now. It goes out only while no checkpoint is open.
        await self.track.park()
        return self._stored(state)

    def _begin(self, index: int, params: dict[str, Any]) -> LoopState:
        items = as_items(params.get("input"))
        before = self._loop
        if before is not None and before.activation == index:
            if before.input != items:
                raise CheckpointFailed(f"session of {self.episode}: activation {index} began with another input")
            return before
        state = LoopState(activation=index, input=items, tool_cookies=self.tool_cookies)
        if before is not None:
            state = state.after(model_cookies=before.model_cookies, turns=before.turns)
        self._record(state, LOOP)
        return state

    def _record(self, state: LoopState | None, following: str) -> None:
        self._loop = state
        turns = state.turns if state is not None else 0
        self.track.record(following, snapshot(state, session=self._session), turns=turns)

    def _stored(self, state: LoopState) -> Activated:
        return Activated(state.reply(), self.track.number, state.turns, state.model_cookies)
