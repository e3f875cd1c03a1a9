"""Which resources server a row belongs to: the part of an owner's options that environment and agent share."""

from pydantic import Field

from gymckpt.roles.failures import EpisodeFailed
from gymckpt.settings import Settings


class TasksetOptions(Settings):
    """Options of a server that owns episodes."""

    tasksets: dict[str, str] = Field(default_factory=dict)
    """Task set -> instance name of the resources server that seeds and verifies its tasks."""
    resources_server: str | None = None
    """For rows of any other task set, and for flat rows that name none; the latter default to the only one there is."""
    episode_timeout_s: float | None = Field(default=7200.0, gt=0)
    """Time limit of an episode; it stands still during checkpoints."""
    clean_up_timeout_s: float = Field(default=20.0, gt=0)
    """For closing an episode's sessions after its end; short enough for a retire to wait for it."""

    @property
    def resources(self) -> frozenset[str]:
        """Every resources server that is named."""
        return frozenset(self.tasksets.values()) | ({self.resources_server} if self.resources_server else set())

    def resources_for(self, taskset: str | None) -> str:
        """The resources server of `taskset` (None: the row names none); raises `EpisodeFailed` (terminal)."""
        found = self.resources_server
        if taskset is None:
            found = found or (next(iter(self.resources)) if len(self.resources) == 1 else None)
        else:
            found = self.tasksets.get(taskset, found)
        if found is None:
            named = "a row without a task set" if taskset is None else f"task set {taskset[:160]!r}"
            known = ", ".join(sorted(self.tasksets)) or "none"
            reason = f"no resources server is configured for {named} (known task sets: {known})"
            raise EpisodeFailed("admission", "unknown_taskset", reason, terminal=True)
        return found
