"""What a deployment says about an agent server."""

from typing import Any

from pydantic import Field, model_validator

from gymckpt.roles.failures import EpisodeFailed
from gymckpt.settings import Settings


class AgentOptions(Settings):
    """Options of Simple Agent."""

    model: str
    """Instance name of the policy model server."""
    resources_server: str | None = None
    """For flat rows, which name no session: by default the only one in `tasksets`."""
    tasksets: dict[str, str] = Field(default_factory=dict)
    """Task set -> resources server, for flat rows that name their task set."""
    max_steps: int | None = Field(default=None, ge=1)
    """Model calls in one activation; None leaves it to the model and to the time limit."""
    capture_sessions: bool = True
    """False: a restart-only participant, which never closes and never blocks; its episodes start over after a crash."""
    model_timeout_s: float = Field(default=86_400.0, gt=0)
    tool_timeout_s: float = Field(default=86_400.0, gt=0)
    episode_timeout_s: float | None = Field(default=7200.0, gt=0)
    """Time limit of an episode that the agent owns (a flat `/run`)."""
    clean_up_timeout_s: float = Field(default=20.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _one_resources_server(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("resources_server") is None:
            servers = set(dict(values.get("tasksets") or {}).values())
            if len(servers) == 1:
                return {**values, "resources_server": servers.pop()}
        return values

    def resources_for(self, taskset: str | None) -> str:
        """The resources server of a flat row; raises `EpisodeFailed` (terminal) if there is none."""
        resources = self.tasksets.get(taskset or "", self.resources_server)
        if resources is None:
            reason = "this agent has no `resources_server` for flat rows: send them to an environment server"
            raise EpisodeFailed("admission", "unknown_taskset", reason, terminal=True)
        return resources
