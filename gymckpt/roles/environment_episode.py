"""One episode of the single-agent-turn protocol: seed, invoke agent, close agent, verify, return."""

import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gymckpt.episodes.driver import Driver
from gymckpt.episodes.floor import Floor
from gymckpt.episodes.steps import Mode, Track
from gymckpt.episodes.time_limit import TimeLimit
from gymckpt.errors import GymckptError
from gymckpt.identity import EpisodeId
from gymckpt.ports import Deadline, Reply
from gymckpt.roles.agent_tools import DIRECT_HTTP, MCP, ToolKind
from gymckpt.roles.environment_record import EnvironmentState, Restored, StepName
from gymckpt.roles.failures import EpisodeFailed
from gymckpt.roles.neighbours import NeighbourFailed, Neighbourhood, number_in, says, says_restart
from gymckpt.wire.control import (
    HEADER_ACTIVATION,
    HEADER_BOUNDARIES,
    HEADER_COHORT,
    HEADER_RESTART,
    HEADER_TURNS,
    HEADER_VERIFY,
    VerifyMode,
)
from gymckpt.wire.gym import Stage, rollout_path

log = logging.getLogger(__name__)

STAGES: dict[StepName, Stage] = {
    "seed": "seed",
    "invoke_agent": "agent",
    "close_agent": "agent",
    "verify": "verification",
    "return": "cleanup",
}
MODES: dict[StepName, Mode] = {"seed": "replay", "invoke_agent": "replay", "close_agent": "wait"}
"""The mode of verify is the resources server's, which says it when it is seeded."""

CLOSE_AGENT_SESSION = "/v1/agent_sessions/close"


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """What an episode is about, and which servers it uses."""

    task_id: dict[str, Any]
    responses_create_params: dict[str, Any]
    task_data: dict[str, Any]
    digest: str
    resources: str
    agent: str


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Bounds on calls to other servers, in seconds. The episode's own time limit is usually reached first."""

    request_s: float
    clean_up_s: float
    """For all of an episode's clean-up."""


class EnvironmentEpisode:
    """Starts at once, in its `driver`; the reply there is the verifier's reply or an `EpisodeFailed`."""

    def __init__(
        self,
        episode: EpisodeId,
        task: EpisodeTask,
        *,
        floor: Floor,
        neighbours: Neighbourhood,
        timeouts: Timeouts,
        limit_s: float | None,
        checkpointing: bool,
        tool_transports: Sequence[ToolKind] = (DIRECT_HTTP,),
        restored: Restored | None = None,
    ) -> None:
        self.episode = episode
        self._tool_transports = tool_transports
        self.task = task
        point = restored.point if restored else None
        self._floor = floor
        self._neighbours = neighbours
        self._timeouts = timeouts
        self._checkpointing = checkpointing
        self._state = (restored.state if restored else None) or EnvironmentState(
            resources=task.resources,
            agent=task.agent,
            resources_session_id=f"resources-session-{uuid.uuid4().hex}",
            agent_session_id=f"agent-session-{uuid.uuid4().hex}",
        )
        self._step: StepName = restored.step if restored else "seed"
        self._turns = point.turns if point else 0
        limit = TimeLimit(neighbours.clock, limit_s, self._state.used_s)
        self.track = Track(floor, neighbours.clock, episode, limit, point=point)
        # Set before the call that opens a session: a reply that is lost still leaves the session behind.
        self._agent_open = self._resources_open = self._step != "seed"
        if self._step in ("verify", "return"):
            self._agent_open = False
        self._resources_prefixed = restored is not None and point is not None and checkpointing
        self.driver = Driver(f"episode {episode}", self._steps, ended=self.track.end, clean_up=self._clean_up)

    async def _steps(self) -> dict[str, Any]:
        steps: dict[StepName, tuple[Callable[[], Awaitable[EnvironmentState]], StepName]] = {
            "seed": (self._seed, "invoke_agent"),
            "invoke_agent": (self._invoke_agent, "close_agent"),
            "close_agent": (self._close_agent, "verify"),
            "verify": (self._verify, "return"),
        }
        while self._step != "return":
            work, following = steps[self._step]
            mode = MODES.get(self._step, self._state.verify)
            try:
                state = await self.track.step(self._step, mode, work)
            except GymckptError as error:
                raise EpisodeFailed.at(STAGES[self._step], error) from error
            self._step = following
            self._state = state.after(used_s=self.track.limit.used_s)
            if following == "return" and state.cohort:
                self.track.stay()
            else:
                self.track.record(following, self._state.snapshot, turns=self._turns)
        await self.track.park()
        result = self._state.result
        if result is None:
            raise EpisodeFailed("cleanup", "no_result", f"episode {self.episode} has no result to return")
        return result

    async def _seed(self) -> EnvironmentState:
        state, task = self._state, self.task
        resources = await self._neighbours.participation(task.resources)
        agent = await self._neighbours.participation(task.agent)
        self._resources_prefixed = resources.participant
        restart = self._checkpointing and not (resources.captures and agent.captures)
        body = {
            "resources_session_id": state.resources_session_id,
            "episode_id": self._reference(),
            "task_id": task.task_id,
            "task_data": task.task_data,
        }
        self._resources_open = True
        given, seeded = await self._call(task.resources, self._resources_path("/seed_session"), body)
        restart = restart or (self._checkpointing and says_restart(seeded))
        self._agent_open = True
        session = self._agent_session(dict(seeded.cookies), given)
        _, opened = await self._call(task.agent, "/v1/agent_sessions", session, headers=_restart(restart))
        if restart or (self._checkpointing and says_restart(opened)):
            self._floor.becomes_restart(self.track)
        verify: VerifyMode = "replay" if seeded.headers.get(HEADER_VERIFY) == "replay" else "wait"
        return state.after(
            resources_cookies=dict(seeded.cookies),
            agent_cookies=dict(opened.cookies),
            verify=verify,
            cohort=says(seeded, HEADER_COHORT),
        )

    async def _invoke_agent(self) -> EnvironmentState:
        state = self._state
        headers = dict(_restart(self.track.restart))
        if self._checkpointing:
            headers[HEADER_ACTIVATION] = str(state.activation)
            headers[HEADER_BOUNDARIES] = str(self.track.number)
        response, reply = await self._call(
            state.agent,
            rollout_path(self.episode, "/v1/responses"),
            self.task.responses_create_params,
            headers=headers,
            cookies=state.agent_cookies,
        )
        self.track.counted(number_in(reply, HEADER_BOUNDARIES))
        self._turns = max(self._turns, number_in(reply, HEADER_TURNS) or _turns_of(response))
        return state.after(response=response, agent_cookies={**state.agent_cookies, **reply.cookies})

    async def _close_agent(self) -> EnvironmentState:
        state = self._state
        closed, _ = await self._call(
            state.agent, CLOSE_AGENT_SESSION, self._closing_agent(), cookies=state.agent_cookies
        )
        self._agent_open = False
        cookies = closed.get("resources_cookies")
        given = {str(k): str(v) for k, v in cookies.items()} if isinstance(cookies, dict) else {}
        return state.after(
            resources_cookies={**state.resources_cookies, **given}, observations=closed.get("agent_observations")
        )

    async def _verify(self) -> EnvironmentState:
        state, task = self._state, self.task
        body = {
            **task.task_data,
            "responses_create_params": task.responses_create_params,
            "response": state.response,
        }
        result, _ = await self._call(
            state.resources, self._resources_path("/verify"), body, cookies=state.resources_cookies, large=True
        )
        reward = result.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise NeighbourFailed(f"{state.resources} verified without a finite reward", kind="bad_reply")
        return state.after(result=result)

    async def _clean_up(self) -> None:
        """Close what was opened. Never inside a checkpoint, where the calls would wait for its end."""
        await self._floor.door.wait_open()
        state, clock = self._state, self._neighbours.clock
        deadline = Deadline.after(clock, self._timeouts.clean_up_s)
        if self._agent_open:
            await self._close(state.agent, CLOSE_AGENT_SESSION, self._closing_agent(), state.agent_cookies, deadline)
        if self._resources_open:
            path = self._resources_path("/close_session")
            closing = {"resources_session_id": state.resources_session_id, "episode_id": self._reference()}
            await self._close(state.resources, path, closing, state.resources_cookies, deadline)

    async def _close(
        self, instance: str, path: str, body: dict[str, Any], cookies: dict[str, str], deadline: Deadline
    ) -> None:
        try:
            await self._call(
                instance, path, body, cookies=cookies, timeout_s=max(1.0, deadline.remaining_s), patience_s=0.0
            )
        except GymckptError as error:
            # The server frees the session itself when the episode is retired there.
            log.info("episode %s: clean-up on %s: %s", self.episode, instance, error)

    async def _call(
        self, instance: str, path: str, body: dict[str, Any], *, timeout_s: float | None = None, **options: Any
    ) -> tuple[dict[str, Any], Reply]:
        server = self._neighbours.server(instance)
        return await self._neighbours.post_json(
            server, path, body, timeout_s=timeout_s or self._timeouts.request_s, **options
        )

    def _agent_session(self, cookies: dict[str, str], seeded: dict[str, Any]) -> dict[str, Any]:
        accesses = {DIRECT_HTTP: self._direct_access, MCP: self._mcp_access}
        return {
            "agent_session_id": self._state.agent_session_id,
            "episode_id": self._reference(),
            "task_id": self.task.task_id,
            "tool_accesses": [accesses[kind](cookies, seeded) for kind in self._tool_transports],
            "sandbox_access": seeded.get("sandbox_access"),
        }

    def _direct_access(self, cookies: dict[str, str], _: dict[str, Any]) -> dict[str, Any]:
        resources = self.task.resources
        return {
            "kind": DIRECT_HTTP,
            "name": f"{resources}.{DIRECT_HTTP}",
            "required": True,
            "base_url": self._neighbours.server(resources).url + "/",
            "cookies": cookies,
            "headers": {},
        }

    def _mcp_access(self, _: dict[str, str], seeded: dict[str, Any]) -> dict[str, Any]:
        given = seeded.get("resources_tools")
        if (
            not isinstance(given, dict)
            or given.get("transport") != "http"
            or not isinstance(given.get("headers"), dict)
        ):
            raise NeighbourFailed(f"{self.task.resources} exposes no tools over MCP", kind="no_mcp", terminal=True)
        url = f"{self._neighbours.server(self.task.resources).url}/{str(given.get('url_path', '')).lstrip('/')}"
        connection = {"transport": "streamable_http", "url": url, "headers": given["headers"]}
        return {"kind": MCP, "name": self.task.resources, "required": True, "connection": connection}

    def _closing_agent(self) -> dict[str, Any]:
        return {"agent_session_id": self._state.agent_session_id, "episode_id": self._reference()}

    def _reference(self) -> dict[str, Any]:
        return {"rollout_id": self.episode.rollout_id, "attempt": self.episode.attempt}

    def _resources_path(self, route: str) -> str:
        return rollout_path(self.episode, route) if self._resources_prefixed else route


def _restart(restart: bool) -> dict[str, str]:
    return {HEADER_RESTART: "1"} if restart else {}


def _turns_of(response: dict[str, Any]) -> int:
    """At least one model call was delivered if there is a response; an agent that counts says how many."""
    return 1 if response.get("output") else 0
