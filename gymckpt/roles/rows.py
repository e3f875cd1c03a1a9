"""Flat rows, the older form of `/run`: one object with the model's part, the verifier's fields and who collects it."""

import uuid
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gymckpt.errors import UsageError
from gymckpt.identity import EpisodeId
from gymckpt.wire.gym import ROLLOUT_INDEX, TASK_INDEX, FlatIdentity, Task, TaskInput, TaskRef

AGENT_REF = "agent_ref"
PARAMS = "responses_create_params"
TASK_ID = "task_id"
COLLECTOR_PREFIX = "_ng_"


@dataclass(frozen=True, slots=True)
class FlatRow:
    """A row taken apart."""

    episode: EpisodeId
    task_id: TaskRef | None
    """Where the row names one."""
    index: int | None
    content: dict[str, Any]
    """The row without what a collector adds for itself: the same in every attempt. The indexes stay, as they do with
    Gym: a verifier that compares the rollouts of one prompt tells them apart by these."""

    @property
    def taskset(self) -> str | None:
        return self.task_id.taskset if self.task_id else None

    def named(self, resources: str) -> TaskRef:
        """The task's id; a row without one is called by its index, as Gym does, in the resources server's name."""
        return self.task_id or TaskRef(taskset=resources, task_id=str(self.index if self.index is not None else ""))

    def task(self, resources: str) -> Task:
        """The typed form."""
        data = {name: value for name, value in self.content.items() if name != PARAMS}
        task_input = TaskInput(responses_create_params=self.content[PARAMS], task_data=data)
        return Task(task_id=self.named(resources), task_input=task_input)


def read_row(row: dict[str, Any]) -> FlatRow:
    """Take a row apart; raises `UsageError`, or `InvalidRolloutId`, for one that cannot be run."""
    try:
        identity = FlatIdentity.model_validate(row)
        named = row.get(TASK_ID)
        task_id = TaskRef.model_validate(named) if isinstance(named, dict) else None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise UsageError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from error
    if not isinstance(row.get(PARAMS), dict):
        raise UsageError(f"{PARAMS}: an object is required")
    added = {AGENT_REF} | ({TASK_ID} if task_id is not None else set())
    kept = {TASK_INDEX, ROLLOUT_INDEX}
    content = {n: v for n, v in row.items() if n not in added and (n in kept or not n.startswith(COLLECTOR_PREFIX))}
    episode = identity.episode or EpisodeId(uuid.uuid4().hex)
    return FlatRow(episode, task_id, identity.task_index, content)
