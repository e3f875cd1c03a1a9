"""A flat `/run`: the agent owns the episode. Stages: seed (replay), the loop, verify (mode from the seed), return."""

import logging
import math
import uuid
from dataclasses import dataclass
from typing import Any

from gymckpt.episodes.driver import Driver
from gymckpt.episodes.steps import Track
from gymckpt.episodes.time_limit import TimeLimit
from gymckpt.errors import GymckptError
from gymckpt.identity import EpisodeId
from gymckpt.ports import Reply
from gymckpt.roles.agent_loop import LOOP, Loop, LoopState, as_items
from gymckpt.roles.agent_record import FlatState, FlatStep, RestoredFlat, snapshot
from gymckpt.roles.agent_session import Bench
from gymckpt.roles.agent_tools import ToolServer
from gymckpt.roles.failures import EpisodeFailed
from gymckpt.roles.neighbours import NeighbourFailed, says, says_restart
from gymckpt.wire.control import HEADER_COHORT, HEADER_VERIFY
from gymckpt.wire.gym import Stage, rollout_path

log = logging.getLogger(__name__)

STAGES: dict[FlatStep, Stage] = {"seed": "seed", "loop": "agent", "verify": "verification", "return": "cleanup"}


@dataclass(frozen=True, slots=True)
class FlatTask:
    """A row without the fields that a collector adds."""

    row: dict[str, Any]
    task_id: dict[str, Any]
    digest: str
    resources: str

    @property
    def params(self) -> dict[str, Any]:
        """The model's part of the row."""
        params = self.row.get("responses_create_params")
        return params if isinstance(params, dict) else {}


class FlatEpisode:
    """Starts at once, in its `driver`; the reply there is the verifier's reply or an `EpisodeFailed`."""

    def __init__(
        self,
        episode: EpisodeId,
        task: FlatTask,
        bench: Bench,
        *,
        limit_s: float | None,
        clean_up_timeout_s: float,
        restart: bool,
        checkpointing: bool,
        restored: RestoredFlat | None = None,
    ) -> None:
        self.episode = episode
        self.task = task
        self._bench = bench
        self._clean_up_timeout_s = clean_up_timeout_s
        self._checkpointing = checkpointing
        self._step: FlatStep = restored.step if restored else "seed"
        self._loop = restored.loop if restored else None
        continued = restored.state if restored and restored.point else None
        self.state = continued or FlatState(
            task_digest=task.digest,
            resources=task.resources,
            resources_session_id=f"resources-session-{uuid.uuid4().hex}",
        )
        self._opened = self._step != "seed"
        self._prefixed = continued is not None and checkpointing
        limit = TimeLimit(bench.neighbours.clock, limit_s, self.state.used_s)
        point = restored.point if restored else None
        self.track = Track(bench.floor, bench.neighbours.clock, episode, limit, point=point)
        if restart:
            bench.floor.becomes_restart(self.track)
        self.driver = Driver(f"episode {episode}", self._drive, ended=self.track.end, clean_up=self._clean_up)

    async def _drive(self) -> dict[str, Any]:
        try:
            return await self._steps()
        except GymckptError as error:
            raise EpisodeFailed.at(STAGES[self._step], error) from error

    async def _steps(self) -> dict[str, Any]:
        if self._step == "seed":
            self.state = await self.track.step("seed", "replay", self._seed)
            loop = LoopState(
                activation=1,
                input=as_items(self.task.params.get("input")),
                tool_cookies=self.state.resources_cookies,
            )
            self._record(loop, LOOP)
        if self._step == "loop" and self._loop is not None:
            tools = ToolServer(self._bench.neighbours.server(self.state.resources), self.state.resources_cookies)
            setting = self._bench.setting(self.track, tools)
            loop_now = Loop(self._loop, self.task.params, self.track, setting, record=self._record, following="verify")
            await loop_now.run()
        if self._step == "verify":
            self.state = await self.track.step("verify", self.state.verify, self._verify)
            if self.state.cohort:
                self.track.stay()
            else:
                self._record(self._loop, "return")
        await self.track.park()
        if self.state.result is None:
            raise EpisodeFailed("cleanup", "no_result", f"episode {self.episode} has no result to return")
        return self.state.result

    def _record(self, loop: LoopState | None, following: str) -> None:
        self._loop = loop
        self._step = "return" if following == "return" else "verify" if following == "verify" else "loop"
        self.state = self.state.after(used_s=self.track.limit.used_s)
        turns = loop.turns if loop is not None else 0
        self.track.record(following, snapshot(loop, episode=self.state), turns=turns)

    async def _seed(self) -> FlatState:
        state, neighbours = self.state, self._bench.neighbours
        resources = await neighbours.participation(state.resources)
        self._prefixed = resources.participant
        # A typed server reads the identity, an older one its own fields at the top of the row.
        body = {
            **self.task.row,
            "resources_session_id": state.resources_session_id,
            "episode_id": self._reference(),
            "task_id": self.task.task_id,
            "task_data": self._task_data(),
        }
        self._opened = True
        _, reply = await self._call("/seed_session", body)
        if self._checkpointing and (not resources.captures or says_restart(reply)):
            self._bench.floor.becomes_restart(self.track)
        return state.after(
            resources_cookies=dict(reply.cookies),
            verify="replay" if reply.headers.get(HEADER_VERIFY) == "replay" else "wait",
            cohort=says(reply, HEADER_COHORT),
        )

    async def _verify(self) -> FlatState:
        loop = self._loop
        response = loop.reply() if loop is not None else None
        cookies = loop.tool_cookies if loop is not None else self.state.resources_cookies
        result, _ = await self._call("/verify", {**self.task.row, "response": response}, cookies=cookies, large=True)
        reward = result.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise NeighbourFailed(f"{self.state.resources} verified without a finite reward", kind="bad_reply")
        return self.state.after(result=result)

    async def _clean_up(self) -> None:
        """Close the session. Never inside a checkpoint, where the call would wait for its end."""
        if not self._opened:
            return
        await self._bench.floor.door.wait_open()
        body = {"resources_session_id": self.state.resources_session_id, "episode_id": self._reference()}
        cookies = self._loop.tool_cookies if self._loop is not None else self.state.resources_cookies
        try:
            await self._call(
                "/close_session", body, cookies=cookies, timeout_s=self._clean_up_timeout_s, patience_s=0.0
            )
        except GymckptError as error:
            # An older server has no such route; a newer one frees the session when the episode is retired there.
            log.info("episode %s: clean-up on %s: %s", self.episode, self.state.resources, error)

    async def _call(
        self, route: str, body: dict[str, Any], *, timeout_s: float | None = None, **options: Any
    ) -> tuple[dict[str, Any], Reply]:
        path = rollout_path(self.episode, route) if self._prefixed else route
        server = self._bench.neighbours.server(self.state.resources)
        timeout_s = timeout_s or self._bench.tool_timeout_s
        return await self._bench.neighbours.post_json(server, path, body, timeout_s=timeout_s, **options)

    def _reference(self) -> dict[str, Any]:
        return {"rollout_id": self.episode.rollout_id, "attempt": self.episode.attempt}

    def _task_data(self) -> dict[str, Any]:
        return {name: value for name, value in self.task.row.items() if name != "responses_create_params"}
