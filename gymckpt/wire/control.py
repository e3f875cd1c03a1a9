"""Messages of the checkpoint control plane, field by field (NeMo Gym partial-rollout checkpoints, October 2026).

Requests refuse unknown fields, and values of another JSON type than their own. Replies are read leniently: another
implementation may say more than we know.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gymckpt.identity import MAX_ATTEMPT, NAME_PATTERN, EpisodeId, Kind, check_rollout_id

PREFIX = "/ng-control/v1/checkpoint"
ROLLOUT_PREFIX = "/ng-rollout"
"""Requests that belong to a rollout carry `/ng-rollout/<capture key>` before their route."""

HEADER_VERIFY = "x-ng-checkpoint-verify"
HEADER_RESTART = "x-ng-checkpoint-restart"
HEADER_ACTIVATION = "x-ng-agent-activation"
HEADER_SESSION_OWNER = "x-ng-session-owner"
HEADER_BOUNDARIES = "x-gymckpt-boundaries"
"""Ours, on an agent's activation and on its reply: how many boundaries the rollout has completed, so that environment
and agent count them together. A server that does not send it is counted as having added none."""
HEADER_TURNS = "x-gymckpt-turns"
"""Ours, on the reply to an activation: how many model calls were delivered to the rollout so far."""

HEADER_COHORT = "x-gymckpt-cohort"
"""Ours, on the reply to a seed, `1`: verdicts come to a whole cohort at once. An episode that has its verdict goes on
to count at the boundary before verify, since after a crash its siblings can only be verified together with it."""

Phase = Literal["idle", "preparing", "prepared", "committed", "restored"]
VerifyMode = Literal["wait", "replay"]
ResourcesMode = Literal["stateless", "exported", "restart_only"]

EXTENSION_RESTORE_LATER_ATTEMPT = "restore_later_attempt"
EXTENSION_PROBE = "probe"
EXTENSION_NEEDS = "needs_by_episode"
EXTENSION_ROLLOUT_PREFIX = "rollout_prefix"
"""Every route of the server also answers behind `/ng-rollout/<capture key>`, so that it knows whose request it is."""
EXTENSION_MCP_ACCESS = "mcp_access"
"""A resources server's tools are reached over MCP too, and a restored session's access is given anew."""
EXTENSIONS = (EXTENSION_RESTORE_LATER_ATTEMPT, EXTENSION_PROBE, EXTENSION_NEEDS, EXTENSION_ROLLOUT_PREFIX)
"""What all our participants offer beyond the published control plane."""

MAX_REPORTED_BLOCKERS = 100
MAX_DEADLINE_S = 3600.0
"""A deadline further away than this is shortened to it."""

CheckpointId = Annotated[str, Field(pattern=NAME_PATTERN)]
RolloutId = Annotated[str, Field(max_length=128), AfterValidator(check_rollout_id)]
"""Another form raises `InvalidRolloutId` itself, through pydantic: it has a code of its own on the wire (400)."""
DeadlineTs = Annotated[float, Field(allow_inf_nan=False, strict=True)]
"""Absolute unix seconds."""


class Message(BaseModel):
    """A body that we read from a caller: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Answer(BaseModel):
    """A body that we read from a server: unknown fields are left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class EpisodeRef(Message):
    """`{"rollout_id", "attempt"}`."""

    rollout_id: RolloutId
    attempt: int = Field(0, ge=0, le=MAX_ATTEMPT, strict=True)

    @property
    def episode(self) -> EpisodeId:
        return EpisodeId(self.rollout_id, self.attempt)

    @classmethod
    def of(cls, episode: EpisodeId) -> "EpisodeRef":
        return cls(rollout_id=episode.rollout_id, attempt=episode.attempt)


class Operation(Message):
    """Prepare, renew, resume: which checkpoint, and by when."""

    checkpoint_id: CheckpointId
    deadline_ts: DeadlineTs


class CommitRequest(Operation):
    checkpoint_dir: str = Field(min_length=1, max_length=4096)
    episode_ids: list[EpisodeRef] | None
    """The scope; null means all (the model refuses null)."""
    stop: bool = Field(default=False, strict=True)
    """The servers' work ends with this checkpoint: external compute may be suspended."""


class RestoreRequest(Operation):
    checkpoint_dir: str = Field(min_length=1, max_length=4096)
    episode_ids: list[EpisodeRef]
    """Per rollout the last attempt ever dispatched or installed; it is installed as the next one."""


class RetireRequest(Operation):
    episode_ids: list[EpisodeRef] = Field(min_length=1)


class ForgetRequest(Operation):
    rollout_ids: list[RolloutId] = Field(min_length=1)


class ProbeRequest(Message):
    """Ours: does this participant see the file at `path` below its root, holding `nonce`?"""

    path: str = Field(min_length=1, max_length=4096)
    nonce: str = Field(pattern=r"^[0-9a-f]{16,64}$")


class Report(Answer):
    """What keeps a participant from being ready, and which episodes it cannot capture."""

    ready: bool
    blockers: list[str] = Field(default_factory=list)
    """At most 100 capture keys or request names."""
    blocker_count: int = 0
    counts: dict[str, int] = Field(default_factory=dict)
    restarts: list[str] = Field(default_factory=list)
    """Capture keys, never cut."""


class Status(Answer):
    kind: Kind
    instance: str
    phase: Phase
    checkpoint_id: str | None = None
    lease_expires_at: float | None = None
    retired_rollouts: int = 0
    report: Report
    mode: ResourcesMode | None = None
    verify: VerifyMode | None = None
    retired_sessions: int | None = None
    restored_pending: int | None = None
    accepting: bool | None = None
    restored_generation_cuts: int | None = None
    boot_id: str | None = None
    """Ours: new at every process start."""
    extensions: list[str] = Field(default_factory=list)
    counters: dict[str, int] = Field(default_factory=dict)


class PrepareReply(Answer):
    phase: Phase
    report: Report


class RenewReply(Answer):
    lease_expires_at: float


class CommitReply(Answer):
    phase: Phase
    manifest: dict[str, Any]
    episode_ids: list[str]
    """Capture keys of the episodes that were written."""
    staging_keys: list[str] | None = None
    staging_keys_by_episode: dict[str, list[str]] | None = None
    needs_by_episode: dict[str, list[tuple[Kind, str]] | None] | None = None
    """Ours: what each boundary's remaining steps will call; null where there is no boundary."""


class RestoreReply(Answer):
    phase: Phase
    source_checkpoint_id: str
    restored: list[str]
    """Capture keys of the new attempts."""


class ResumeReply(Answer):
    phase: Phase
    idempotent: bool


class RetireReply(Answer):
    retired: list[str]


class ForgetReply(Answer):
    forgotten: list[str]


class ProbeReply(Answer):
    seen: bool
    free_bytes: int


class ErrorBody(Answer):
    code: str
    detail: str


class ErrorReply(Answer):
    """`{"error": {"code", "detail"}}`, every refusal of the control plane."""

    error: ErrorBody
