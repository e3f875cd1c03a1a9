"""What a deployment says about an agent server."""

from pydantic import Field

from gymckpt.roles.tasksets import TasksetOptions


class AgentOptions(TasksetOptions):
    """Options of Simple Agent. Task sets, resources server and time limit are for flat rows, which it owns itself."""

    model: str
    """Instance name of the policy model server."""
    max_steps: int | None = Field(default=None, ge=1)
    """Model calls in one activation; None leaves it to the model and to the time limit."""
    capture_sessions: bool = True
    """False: a restart-only participant, which never closes and never blocks; its episodes start over after a crash."""
    model_timeout_s: float = Field(default=86_400.0, gt=0)
    tool_timeout_s: float = Field(default=86_400.0, gt=0)
