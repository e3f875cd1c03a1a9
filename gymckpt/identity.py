"""Names: of tasks, of attempts, of checkpoints, and of whatever may become a file name.

Every name that reaches a path, a route or a journal is made by this module or checked by it.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from gymckpt.errors import InvalidRolloutId, UsageError

Kind: TypeAlias = Literal["environment", "model", "agent", "resources"]
KINDS: tuple[Kind, ...] = get_args(Kind)

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""Safe names: 1 to 128 characters, the first alphanumeric. Fit for a path segment: no slash, never `.` or `..`."""

MAX_ATTEMPT = 10**9
"""An attempt above this is refused: it can only be damage."""

_NAME = re.compile(NAME_PATTERN.removesuffix("$") + r"\Z")
_ATTEMPT_SUFFIX = re.compile(r"-a([1-9][0-9]*)\Z")
_CHECKPOINT = re.compile(r"^ckpt-([0-9]{6,9})-[0-9a-f]{8}\Z")


def is_safe_name(name: str) -> bool:
    """Whether `name` may be a path segment and an id on the wire."""
    return _NAME.match(name) is not None


def check_rollout_id(rollout_id: str) -> str:
    """Give `rollout_id` back, or raise `InvalidRolloutId`: unsafe characters, or an ending that reads as an attempt."""
    if not is_safe_name(rollout_id) or _ATTEMPT_SUFFIX.search(rollout_id):
        raise InvalidRolloutId(f"rollout_id {rollout_id[:160]!r} is not 1 to 128 of [A-Za-z0-9._-], or ends in -a<N>")
    return rollout_id


@dataclass(frozen=True, slots=True)
class TaskId:
    """One row of the input."""

    taskset: str
    task_id: str


class EpisodeId(NamedTuple):
    """One attempt (0, 1, 2, ...) at one rollout. A tuple: made and looked up by the hundred thousand."""

    rollout_id: str
    attempt: int = 0

    @property
    def capture_key(self) -> str:
        """The episode's name in paths and reports: `rollout_id`, or `rollout_id-aN` from attempt 1 on."""
        return f"{self.rollout_id}-a{self.attempt}" if self.attempt else self.rollout_id

    @property
    def next(self) -> "EpisodeId":
        """The attempt after this one."""
        return EpisodeId(self.rollout_id, self.attempt + 1)

    @classmethod
    def parse(cls, capture_key: str) -> "EpisodeId":
        """The episode that `capture_key` names; raises `InvalidRolloutId` if it names none."""
        rollout_id, attempt = capture_key, 0
        if match := _ATTEMPT_SUFFIX.search(capture_key):
            rollout_id, attempt = capture_key[: match.start()], int(match.group(1)[:12])
        if attempt > MAX_ATTEMPT:
            raise InvalidRolloutId(f"attempt {attempt} in {capture_key[:160]!r} is beyond {MAX_ATTEMPT}")
        return cls(check_rollout_id(rollout_id), attempt)

    def __str__(self) -> str:
        return self.capture_key


def new_checkpoint_id(sequence: int) -> str:
    """A name for checkpoint number `sequence` (or for a restore) that no other run can have chosen."""
    return f"ckpt-{sequence:06d}-{secrets.token_hex(4)}"


def checkpoint_sequence(checkpoint_id: str) -> int:
    """The sequence number inside a checkpoint id of ours; raises `UsageError` on another form."""
    match = _CHECKPOINT.match(checkpoint_id)
    if match is None:
        raise UsageError(f"{checkpoint_id[:160]!r} is not a checkpoint id (ckpt-NNNNNN-xxxxxxxx)")
    return int(match.group(1))


def new_run_id() -> str:
    """32 hex digits. The first eight begin every rollout id of the run: requests of another run never fit."""
    return secrets.token_hex(16)


def make_rollout_id(run_id: str, task_index: int, repeat: int) -> str:
    """`<first 8 of run id>-<task>-<repeat>`: stable for ever, and safe as a name."""
    return f"{run_id[:8]}-{task_index}-{repeat}"
