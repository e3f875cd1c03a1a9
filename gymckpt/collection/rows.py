"""One row of the input: its two shapes, what is wrong with it, and what it becomes on the wire."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gymckpt import jsoncodec
from gymckpt.collection.routing import Routing
from gymckpt.identity import EpisodeId, TaskId
from gymckpt.wire import gym

MAX_ID = 512
ENVELOPE_LEVELS = 8
"""More than a request or an outcome puts around a row."""


class BadRow(ValueError):
    """Why a row cannot be planned, in a few words."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A good row: where it goes, what it says, and the id that it gave itself (typed rows only)."""

    owner: str
    row: dict[str, Any]
    agent: str | None = None
    task: TaskId | None = None
    cohort: str | None = None


def read_row(line: bytes, routing: Routing, *, cohort: str | None, overrides: Mapping[str, Any]) -> TaskRow:
    """Check and route one line; sampling `overrides` are laid over its parameters. Raises `BadRow`."""
    try:
        row = jsoncodec.loads(line)
    except ValueError as error:
        raise BadRow(str(error)) from None
    if not isinstance(row, dict):
        raise BadRow(f"a JSON {type(row).__name__}, not an object")
    typed = isinstance(row.get("task_id"), dict) or "task_input" in row
    found = _typed(row, routing) if typed else _flat(row, routing)
    params = parameters(found.row)
    params.update(overrides)
    taskset = found.task.taskset if found.task is not None else ""
    if cohort is None and (is_comparative(found.agent or found.owner) or taskset == PAIRWISE):
        cohort = PROMPT
    return TaskRow(found.owner, found.row, found.agent, found.task, _cohort(found.row, cohort))


def check_depth(row: Mapping[str, Any]) -> None:
    """Raise `BadRow` if the row could be read, and not be sent inside a request: it is nested too deeply."""
    wrapped: Any = row
    for _ in range(ENVELOPE_LEVELS):
        wrapped = [wrapped]
    try:
        jsoncodec.dumps(wrapped)
    except jsoncodec.NotJson as error:
        raise BadRow(str(error)[:200]) from None


def is_comparative(name: str) -> bool:
    """Whether this agent's verifier compares all rollouts of one prompt (Gym's `genrm_compare`), so that they form a
    cohort although nobody said so."""
    return "genrm" in name


def _typed(row: dict[str, Any], routing: Routing) -> TaskRow:
    reference, task = row.get("task_id"), row.get("task_input")
    if not isinstance(reference, dict) or not isinstance(task, dict):
        raise BadRow("a typed row needs the objects task_id and task_input")
    ids = {}
    for name in ("taskset", "task_id"):
        value = reference.get(name)
        # An id may be written as a number; on the wire it is a string, so 1 and "1" are the same task.
        if isinstance(value, bool) or not isinstance(value, str | int) or not 1 <= len(str(value)) <= MAX_ID:
            raise BadRow(f"task_id.{name} must be a string of 1 to {MAX_ID} characters")
        ids[name] = str(value)
    if not isinstance(task.get("responses_create_params"), dict):
        raise BadRow("task_input.responses_create_params must be an object")
    if not isinstance(task.get("task_data", {}), dict):
        raise BadRow("task_input.task_data must be an object")
    identity = TaskId(**ids)
    return TaskRow(_routed(lambda: routing.typed(identity)), {**row, "task_id": ids}, None, identity)


def _flat(row: dict[str, Any], routing: Routing) -> TaskRow:
    if not isinstance(row.get("responses_create_params"), dict):
        raise BadRow("neither typed (task_id, task_input) nor flat (responses_create_params)")
    kept = {name: value for name, value in row.items() if not name.startswith("_ng_")}
    owner, agent = _routed(lambda: routing.flat(row))
    if "agent_ref" not in kept and agent != owner:
        kept["agent_ref"] = {"name": agent}
    return TaskRow(owner, kept, agent)


def _routed(find: Any) -> Any:
    try:
        return find()
    except LookupError as error:
        raise BadRow(str(error)) from None


def _cohort(row: Mapping[str, Any], name: str | None) -> str | None:
    if name is None:
        return None
    data = row["task_input"].get("task_data", {}) if "task_input" in row else row
    if name == PROMPT and name not in data:
        return hashlib.sha256(jsoncodec.canonical(parameters(row).get("input"))).hexdigest()
    if name not in data:
        raise BadRow(f"the cohort field {name!r} is missing")
    return jsoncodec.canonical(data[name]).decode()[:MAX_ID]


def parameters(row: Mapping[str, Any]) -> dict[str, Any]:
    """The `responses_create_params` of a row of either shape."""
    found: dict[str, Any] = row["task_input"]["responses_create_params"] if "task_input" in row else row[PARAMS]
    return found


PARAMS = "responses_create_params"
PAIRWISE = "pairwise"
"""The bundled task set whose verifier compares all rollouts of one prompt."""
PROMPT = "prompt"
"""As a cohort field: rows with equal input, unless they have a field of that name."""


def with_repeat(row: dict[str, Any], repeat: int) -> dict[str, Any]:
    """The row for one repeat: a `metadata.seed` becomes `<seed>/<repeat>`, so that repeats are different samples."""
    params = parameters(row)
    metadata = params.get("metadata")
    if repeat == 0 or not isinstance(metadata, dict) or "seed" not in metadata:
        return row
    params = {**params, "metadata": {**metadata, "seed": f"{metadata['seed']}/{repeat}"}}
    if "task_input" in row:
        return {**row, "task_input": {**row["task_input"], PARAMS: params}}
    return {**row, PARAMS: params}


def request_body(row: Mapping[str, Any], episode: EpisodeId, task: int, repeat: int) -> dict[str, Any]:
    """What `POST /run` sends for an attempt at a planned row: the typed request, or the flat row with its identity."""
    if "task_input" in row:
        return {
            "episode_id": {"rollout_id": episode.rollout_id, "attempt": episode.attempt},
            "task": {"task_id": row["task_id"], "task_input": row["task_input"]},
        }
    identity = {gym.TASK_INDEX: task, gym.ROLLOUT_INDEX: repeat, gym.ROLLOUT_ID: episode.rollout_id}
    attempt = {gym.ATTEMPT_INDEX: episode.attempt} if episode.attempt else {}
    return {**row, **identity, **attempt}


def result_row(
    reply: Mapping[str, Any], row: Mapping[str, Any], episode: EpisodeId, task: int, repeat: int
) -> dict[str, Any]:
    """A row of rollouts.jsonl: the verifier's reply, stamped with the rollout's identity."""
    stamped = {
        **reply,
        gym.TASK_INDEX: task,
        gym.ROLLOUT_INDEX: repeat,
        gym.ROLLOUT_ID: episode.rollout_id,
        gym.ATTEMPT_INDEX: episode.attempt,
    }
    if "agent_ref" in row:
        stamped["agent_ref"] = row["agent_ref"]
    return stamped
