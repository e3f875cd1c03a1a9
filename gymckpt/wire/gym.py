"""Messages of Gym's data plane (NeMo Gym 0.7): episodes, sessions, verification, and the head server's answers.

Only the envelope is modelled. Payloads (`responses_create_params`, `response`, `task_data`, verify replies) pass
through as the JSON they came as, so that nothing is lost that we do not know.
"""

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from gymckpt.identity import EpisodeId
from gymckpt.wire.control import ROLLOUT_PREFIX, Answer, EpisodeRef, RolloutId

TASK_INDEX: Final = "_ng_task_index"
ROLLOUT_INDEX: Final = "_ng_rollout_index"
ROLLOUT_ID: Final = "_ng_rollout_id"
ATTEMPT_INDEX: Final = "_ng_attempt_index"
"""Fields that a collector adds to a flat row and stamps on its result."""

AGGREGATE_METRICS_PATH: Final = "/aggregate_metrics"
"""What a server makes of all results of a run."""
MCP_PATH: Final = "/mcp"
"""Where a resources server that exposes its tools over MCP answers."""
MCP_SESSION_HEADER: Final = "X-NeMo-Gym-Session-Token"
"""Names the session of an MCP request, by a token that came with its seed."""
MCP_ACCESS_PATH: Final = "/ng-control/v1/mcp-access"
"""Ours: gives a session's MCP access anew, `{"episode_id"}` -> `{"resources_tools"}`, to holders of the control
token."""

Stage = Literal["admission", "seed", "agent", "verification", "cleanup"]


class Body(BaseModel):
    """A request on the data plane: unknown fields are left alone, as Gym does."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class TaskRef(Body):
    taskset: str = Field(max_length=512)
    task_id: str = Field(max_length=512)


class TaskInput(BaseModel):
    """What a task asks: `task_data` is the verifier's."""

    model_config = ConfigDict(extra="allow", frozen=True)

    responses_create_params: dict[str, Any]
    task_data: dict[str, Any] = Field(default_factory=dict)


class Task(Body):
    task_id: TaskRef
    task_input: TaskInput


class RunRequest(Body):
    """`POST /run` on an environment server, typed form."""

    episode_id: EpisodeRef
    task: Task


class RunFailure(Answer):
    failure_reason: str
    terminal: bool = False
    failure_kind: str | None = None
    stage: Stage | None = None


class RunReply(Answer):
    """The typed reply to `/run`: a result or a failure."""

    episode_id: EpisodeRef
    task_id: TaskRef
    result: dict[str, Any] | None = None
    failure: RunFailure | None = None


class SeedRequest(Body):
    """`POST /seed_session` on a resources server."""

    resources_session_id: str = Field(max_length=512)
    episode_id: EpisodeRef
    task_id: TaskRef
    task_data: dict[str, Any] = Field(default_factory=dict)


class McpAccessRequest(Body):
    """`POST /ng-control/v1/mcp-access`: whose session."""

    episode_id: EpisodeRef


class CloseSessionRequest(Body):
    resources_session_id: str = Field(max_length=512)
    episode_id: EpisodeRef


class McpConnection(BaseModel):
    """Where an MCP server is, and what names the session there."""

    model_config = ConfigDict(extra="allow", frozen=True)

    transport: str = "streamable_http"
    url: str
    headers: dict[str, str] = Field(default_factory=dict, repr=False)


class ToolAccess(BaseModel):
    """How an agent reaches the tools of one resources server. `name` is `<instance>.direct_http`, or for MCP the
    instance."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: str
    name: str = Field(max_length=512)
    required: bool = True
    base_url: str | None = None
    cookies: dict[str, str] = Field(default_factory=dict)
    headers: dict[str, str] = Field(default_factory=dict)
    connection: McpConnection | None = None


class AgentSessionRequest(Body):
    """`POST /v1/agent_sessions`."""

    agent_session_id: str = Field(max_length=512)
    episode_id: EpisodeRef
    task_id: TaskRef
    tool_accesses: list[ToolAccess] = Field(default_factory=list)
    sandbox_access: dict[str, Any] | None = None


class CloseAgentSessionRequest(Body):
    """`POST /v1/agent_sessions/close`."""

    agent_session_id: str = Field(max_length=512)
    episode_id: EpisodeRef


class CloseAgentSessionReply(Answer):
    agent_session_id: str
    agent_observations: Any = None
    resources_cookies: dict[str, str] = Field(default_factory=dict)


class FlatIdentity(Body):
    """The identity fields of a flat row; a collector that does not know `_ng_rollout_id` sends only the indexes."""

    task_index: int | None = Field(None, alias=TASK_INDEX, ge=0)
    rollout_index: int | None = Field(None, alias=ROLLOUT_INDEX, ge=0)
    rollout_id: RolloutId | None = Field(None, alias=ROLLOUT_ID)
    attempt: int = Field(0, alias=ATTEMPT_INDEX, ge=0)

    @property
    def episode(self) -> EpisodeId | None:
        """The episode the row names, as Gym derives it where no rollout id is given; None if it names none."""
        if self.rollout_id is not None:
            return EpisodeId(self.rollout_id, self.attempt)
        if self.task_index is not None and self.rollout_index is not None:
            return EpisodeId(f"{self.task_index}-{self.rollout_index}", self.attempt)
        return None


class ServerInstance(Answer):
    """One line of the head server's `GET /server_instances`."""

    name: str
    process_name: str | None = None
    server_type: str | None = None
    url: str
    pid: int | None = None
    start_time: float | None = None
    status: str | None = None


def rollout_path(episode: EpisodeId, route: str) -> str:
    """`route` with the episode's capture key in front."""
    return f"{ROLLOUT_PREFIX}/{episode.capture_key}{route}"
