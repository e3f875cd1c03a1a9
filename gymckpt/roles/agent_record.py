"""What an agent server keeps of an episode in a checkpoint.

Record: `{episode_id, session_key, session, boundary, episode}`. `session` is set for an agent session, `episode` for an
episode that the agent itself owns (a flat `/run`). No address and no token: servers are named, and found again in the
agent's own configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymckpt.episodes.boundary import BoundaryRecord, Point, Snapshot
from gymckpt.errors import InvalidCheckpointState
from gymckpt.identity import EpisodeId
from gymckpt.roles.agent_loop import LoopState
from gymckpt.roles.agent_tools import ToolKind
from gymckpt.storage.records import ExportedRecord, Needs, Record, StoredRecord
from gymckpt.wire.control import EpisodeRef, VerifyMode

FlatStep = Literal["seed", "loop", "verify", "return"]
SessionStep = Literal["activate", "loop", "return"]


class SessionTools(BaseModel):
    """A session's tool server: its name, and the cookies the session was seeded with."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    server: str = Field(max_length=128)
    kind: ToolKind = "direct_http"
    cookies: dict[str, str] = Field(default_factory=dict)


class SessionState(BaseModel):
    """What an agent session was seeded with."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    task_id: dict[str, Any]
    tools: SessionTools | None = None


class FlatState(BaseModel):
    """An episode that the agent owns, beside its loop. Never changed: each step makes a new one."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    task_digest: str = Field(pattern=r"^([0-9a-f]{64})?$")
    resources: str = Field(max_length=128)
    resources_session_id: str = Field(max_length=512)
    resources_cookies: dict[str, str] = Field(default_factory=dict)
    verify: VerifyMode = "wait"
    cohort: bool = False
    """Its verdict counts together with those of its siblings (`HEADER_COHORT`)."""
    result: dict[str, Any] | None = None
    used_s: float = Field(default=0.0, ge=0)

    def after(self, **changes: Any) -> "FlatState":
        """This state with `changes` from a step."""
        return self.model_copy(update=changes)


class AgentRecord(BaseModel):
    """An episode as a checkpoint holds it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    episode_id: EpisodeRef
    session_key: str | None = Field(default=None, max_length=512)
    session: SessionState | None = None
    boundary: BoundaryRecord | None
    episode: FlatState | None = None


@dataclass(frozen=True, slots=True)
class RestoredSession:
    """A checked record of a session: at rest before its first activation if `loop` is None."""

    key: str
    session: SessionState
    point: Point
    loop: LoopState | None


@dataclass(frozen=True, slots=True)
class RestoredFlat:
    """A checked record of an episode that the agent owns. Without a boundary it starts over."""

    state: FlatState
    step: FlatStep = "seed"
    point: Point | None = None
    loop: LoopState | None = None

    @property
    def task_digest(self) -> str:
        return self.state.task_digest


def snapshot(
    loop: LoopState | None, *, session: SessionState | None = None, episode: FlatState | None = None
) -> Callable[[], Snapshot]:
    """For a boundary: the loop's state as it is now, with what stands beside the boundary in a record."""
    pinned = loop.snapshot() if loop is not None else None

    def take() -> Snapshot:
        taken = pinned() if pinned is not None else Snapshot({})
        beside = {
            "session": session.model_dump() if session is not None else None,
            "episode": {name: getattr(episode, name) for name in FlatState.model_fields} if episode else None,
        }
        return Snapshot({"loop": taken.state, **beside}, taken.under("/loop"))

    return take


def export(
    episode: EpisodeId, point: Point | None, needs: Needs | None, *, key: str | None, flat: FlatState | None = None
) -> ExportedRecord:
    """The record of `episode` at `point`; without one, `flat` is what an episode that starts over is known by."""
    reference = {"rollout_id": episode.rollout_id, "attempt": episode.attempt}
    record: Record = {"episode_id": reference, "session_key": key, "session": None, "boundary": None, "episode": None}
    if point is None:
        record["episode"] = flat.model_dump() if flat is not None else None
        return ExportedRecord(episode, record, revision=0)
    taken = point.as_json()
    parts = taken.state["state"]
    record["session"], record["episode"] = parts.get("session"), parts.get("episode")
    record["boundary"] = {**taken.state, "state": parts["loop"]}
    lists = {name.replace("/state/loop", "/boundary/state", 1): length for name, length in taken.lists.items()}
    return ExportedRecord(
        episode,
        record,
        boundary=point.boundary,
        turns=point.turns,
        needs=needs,
        revision=point.boundary.number,
        lists=lists,
    )


def read(stored: StoredRecord) -> RestoredSession | RestoredFlat:
    """Check one record; raises `InvalidCheckpointState` naming the episode and the field."""
    try:
        record = AgentRecord.model_validate(stored.record)
        if record.episode_id.episode != stored.episode:
            raise InvalidCheckpointState(f"the record listed as {stored.episode} is of {record.episode_id.episode}")
        if record.session is not None:
            return _session(record, record.session)
        if record.episode is not None:
            return _flat(record, record.episode)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidCheckpointState(f"agent record of {stored.episode}: {where}: {first['msg']}") from error
    raise InvalidCheckpointState(f"agent record of {stored.episode} holds neither a session nor an episode")


def _session(record: AgentRecord, session: SessionState) -> RestoredSession:
    episode = record.episode_id.episode
    if record.session_key is None or record.boundary is None:
        raise InvalidCheckpointState(f"agent record of {episode}: a session without its key or boundary")
    step = _SessionStep.model_validate({"step": record.boundary.step}).step
    loop = LoopState.read(record.boundary.state) if step != "activate" else None
    return RestoredSession(record.session_key, session, record.boundary.point(snapshot(loop, session=session)), loop)


def _flat(record: AgentRecord, flat: FlatState) -> RestoredFlat:
    if record.boundary is None:
        return RestoredFlat(flat)
    step = _FlatStep.model_validate({"step": record.boundary.step}).step
    loop = LoopState.read(record.boundary.state)
    if step == "return" and flat.result is None:
        raise InvalidCheckpointState(f"agent record of {record.episode_id.episode}: at return without result")
    return RestoredFlat(flat, step, record.boundary.point(snapshot(loop, episode=flat)), loop)


class _SessionStep(BaseModel):
    step: SessionStep


class _FlatStep(BaseModel):
    step: FlatStep
