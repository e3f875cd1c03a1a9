"""What an environment server keeps of an episode: its state at a boundary, and the record in a checkpoint.

Record: `{episode_id, task_digest, boundary}`; boundary: `{step, number, at, turns, state}` or null.
"""

from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymckpt import jsoncodec
from gymckpt.episodes.boundary import BoundaryRecord, Point, Snapshot, pointer
from gymckpt.errors import InvalidCheckpointState
from gymckpt.identity import EpisodeId
from gymckpt.storage.records import ExportedRecord, Needs, StoredRecord
from gymckpt.wire.control import EpisodeRef, VerifyMode

StepName = Literal["seed", "invoke_agent", "close_agent", "verify", "return"]
"""The single-agent-turn protocol, in order."""


class EnvironmentState(BaseModel):
    """Everything the remaining steps of an episode need. Never changed: each step makes a new one."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    resources: str = Field(max_length=128)
    """Instance name of the resources server; addresses come from the configuration."""
    agent: str = Field(max_length=128)
    resources_session_id: str = Field(max_length=512)
    agent_session_id: str = Field(max_length=512)
    resources_cookies: dict[str, str] = Field(default_factory=dict)
    agent_cookies: dict[str, str] = Field(default_factory=dict)
    verify: VerifyMode = "wait"
    cohort: bool = False
    """Its verdict counts together with those of its siblings (`HEADER_COHORT`)."""
    activation: int = Field(default=1, ge=1)
    """Index of the one activation of the agent: the same in every attempt, so that a stored reply is found."""
    response: dict[str, Any] | None = None
    observations: Any = None
    result: dict[str, Any] | None = None
    used_s: float = Field(default=0.0, ge=0)
    """Of the episode's time limit."""

    def after(self, **changes: Any) -> "EnvironmentState":
        """This state with `changes` from a step."""
        return self.model_copy(update=changes)

    def snapshot(self) -> Snapshot:
        """As JSON. The response's output does not change once it is here, so that it is written once."""
        state = {name: getattr(self, name) for name in type(self).model_fields}
        output = self.response.get("output") if self.response is not None else None
        lists = {pointer("response", "output"): len(output)} if isinstance(output, list) else {}
        return Snapshot(state, lists)


class EnvironmentRecord(BaseModel):
    """An episode as a checkpoint holds it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    episode_id: EpisodeRef
    task_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    boundary: BoundaryRecord | None


@dataclass(frozen=True, slots=True)
class Restored:
    """A record that was checked: where the replacement continues. Without a boundary it starts over."""

    task_digest: str
    step: StepName = "seed"
    state: EnvironmentState | None = None
    point: Point | None = None


def task_digest(task_id: dict[str, Any], task_input: dict[str, Any]) -> str:
    """SHA-256 over the task's canonical JSON: a restored episode goes on only with the task it began with."""
    return sha256(jsoncodec.canonical({"task_id": task_id, "task_input": task_input})).hexdigest()


def export(episode: EpisodeId, digest: str, point: Point | None) -> ExportedRecord:
    """The record of `episode` at `point`."""
    reference = {"rollout_id": episode.rollout_id, "attempt": episode.attempt}
    record: dict[str, Any] = {"episode_id": reference, "task_digest": digest, "boundary": None}
    if point is None:
        return ExportedRecord(episode, record, revision=0)
    taken = point.as_json()
    record["boundary"] = taken.state
    state = taken.state["state"]
    return ExportedRecord(
        episode,
        record,
        boundary=point.boundary,
        turns=point.turns,
        needs=needs(point.boundary.step, state["agent"], state["resources"]),
        revision=point.boundary.number,
        lists=taken.under("/boundary"),
    )


def needs(step: str, agent: str, resources: str) -> Needs:
    """Whom the remaining steps from `step` on will call. The agent's own record names the model where it needs it."""
    match step:
        case "return":
            return ()
        case "verify":
            return (("resources", resources),)
        case _:
            return (("agent", agent), ("resources", resources))


def read(stored: StoredRecord, servers: Collection[str]) -> Restored:
    """Check one record against the instance names known here; raises `InvalidCheckpointState` naming the episode."""
    try:
        record = EnvironmentRecord.model_validate(stored.record)
        if record.episode_id.episode != stored.episode:
            raise InvalidCheckpointState(f"the record listed as {stored.episode} is of {record.episode_id.episode}")
        if record.boundary is None:
            return Restored(task_digest=record.task_digest)
        state = EnvironmentState.model_validate(record.boundary.state)
        step = _Step.model_validate({"step": record.boundary.step}).step
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidCheckpointState(f"environment record of {stored.episode}: {where}: {first['msg']}") from error
    for instance in (state.agent, state.resources):
        if instance not in servers:
            raise InvalidCheckpointState(f"environment record of {stored.episode}: no server is called {instance!r}")
    lacking = _lacking(step, state)
    if lacking:
        raise InvalidCheckpointState(f"environment record of {stored.episode}: at {step} without {lacking}")
    return Restored(record.task_digest, step, state, record.boundary.point(state.snapshot))


class _Step(BaseModel):
    step: StepName


def _lacking(step: StepName, state: EnvironmentState) -> str | None:
    if step in ("close_agent", "verify", "return") and state.response is None:
        return "response"
    if step == "return" and state.result is None:
        return "result"
    return None
