"""What verbs print with `--json`, as models. Versioned by their schemas: fields may be added, never changed."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Document(BaseModel):
    """A JSON document on stdout."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BoundaryView(Document):
    """Where an episode continues: shown as `step/number`."""

    step: str
    number: int
    at: float
    """Unix seconds."""

    def __str__(self) -> str:
        return f"{self.step}/{self.number}"


class EpisodeView(Document):
    """One episode of a checkpoint, merged from the indexes of all participants."""

    rollout_id: str
    attempt: int
    boundary: BoundaryView | None
    turns: int
    bytes: int
    """Over all participants, before compression."""
    restart: str | None
    """Why the episode starts over instead of continuing; null if it continues."""
    kinds: list[str]
    """Kinds of the participants that hold a record of it."""


class CheckpointView(Document):
    checkpoint_id: str
    sequence: int
    created_at: float
    valid: bool
    episodes: int
    """How many continue."""
    restarts: int
    """How many are listed as restarted."""
    bytes: int
    name: str | None = None
    """Given by the user: such a checkpoint is never pruned."""


class InspectDocument(Document):
    """`gymckpt inspect DIR --json`. Counts are null where there is no run, only a checkpoint."""

    run_id: str | None
    planned: int | None
    succeeded: int | None
    failed: int | None
    omitted: int | None
    unresolved: int | None
    checkpoints: list[CheckpointView]
    checkpoint_id: str | None
    """The checkpoint whose episodes are listed."""
    episodes: list[EpisodeView]
    truncated: bool
    """Whether `episodes` is cut; `checkpoints` has the whole counts."""


class ProblemView(Document):
    file: str
    what: str
    episodes: list[str]
    unreadable: bool = False
    """It could not be read now, which is no damage: the verdict on it is missing."""


class VerifiedCheckpoint(Document):
    checkpoint_id: str
    valid: bool
    problems: list[ProblemView]


class VerifyDocument(Document):
    """`gymckpt verify DIR --json`."""

    checkpoints: list[VerifiedCheckpoint]
    restorable: str | None
    """The checkpoint that a restore would use."""
    problems: list[ProblemView] = Field(default_factory=list)
    """Damage outside checkpoints: run.json, the plan, the journals, the result files."""

    @property
    def found(self) -> list[ProblemView]:
        """Everything that is wrong, wherever it is."""
        return [*self.problems, *(problem for checkpoint in self.checkpoints for problem in checkpoint.problems)]


class CountsView(Document):
    """The four sets; planned is their sum."""

    planned: int
    succeeded: int
    failed: int
    omitted: int
    unresolved: int


class EstimateView(Document):
    """A mean over tasks with its 95 % confidence interval; null with fewer than two tasks."""

    value: float
    low: float | None
    high: float | None


class ScoresView(Document):
    tasks: int
    planned: int
    """Rollouts that were planned and not omitted."""
    samples: int
    """Succeeded rollouts: attempts are not samples."""
    mean_scored: EstimateView | None
    """mean@k over samples."""
    mean_planned: EstimateView | None
    """mean@k over everything planned: a missing sample earned nothing."""
    pass_at: dict[str, float]
    """pass@k by k over tasks with at least k samples."""
    pass_at_planned: dict[str, float]
    """pass@k by k over all tasks: a missing sample did not pass."""


class TaskView(Document):
    task: int
    """Its place in the input, from 0."""
    samples: int
    mean: float
    passes: int


class ReportDocument(Document):
    """`gymckpt report DIR --json`."""

    run_id: str
    counts: CountsView
    attempts: int
    whole: ScoresView
    by_agent: dict[str, ScoresView]
    failures: dict[str, int]
    """Rollouts that failed, by kind."""
    tasks: list[TaskView]
    """With `--tasks`: each task that has a sample."""


class ServerView(Document):
    instance: str
    url: str
    kind: str | None
    """Null for a server that is no participant."""
    phase: str | None = None
    checkpoint_id: str | None = None
    lease_expires_at: float | None = None
    mode: str | None = None
    verify: str | None = None
    boot_id: str | None = None
    in_flight: dict[str, int] = Field(default_factory=dict)
    blockers: list[str] = Field(default_factory=list)
    blocker_count: int = 0
    restarts: int = 0
    retired_rollouts: int = 0
    counters: dict[str, int] = Field(default_factory=dict)
    problem: str | None = None
    """Why it could not be asked."""


class StatusDocument(Document):
    """`gymckpt status --json`."""

    servers: list[ServerView]


class Started(Document):
    event: Literal["started"] = "started"
    run_id: str
    pid: int


class CheckpointTaken(Document):
    event: Literal["checkpoint"] = "checkpoint"
    checkpoint_id: str
    episodes: int
    restarts: int
    bytes: int
    pause_s: float
    commit_s: float


class CheckpointNotTaken(Document):
    event: Literal["checkpoint_failed"] = "checkpoint_failed"
    checkpoint_id: str | None
    reason: str


class Restored(Document):
    event: Literal["restored"] = "restored"
    checkpoint_id: str
    episodes: int
    restarted: int


class OutcomeKnown(Document):
    event: Literal["outcome"] = "outcome"
    rollout_id: str
    attempt: int
    outcome: str
    reward: float | None


class Note(Document):
    """A word to the person who watches."""

    event: Literal["note"] = "note"
    text: str


class EmbeddedServerChanged(Document):
    event: Literal["server_died", "server_restarted", "server_gave_up"]
    instance: str
    detail: str


class Done(Document):
    event: Literal["done"] = "done"
    run_id: str
    planned: int
    succeeded: int
    failed: int
    omitted: int
    unresolved: int
    exit_code: int


class ServerReady(Document):
    kind: str
    instance: str
    url: str


class Ready(Document):
    """The first line of `gymckpt serve --json`."""

    event: Literal["ready"] = "ready"
    servers: list[ServerReady]


class ServerChanged(Document):
    """A later line of `gymckpt serve --json`."""

    event: Literal["died", "restarted", "gave_up"]
    instance: str
    detail: str
