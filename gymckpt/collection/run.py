"""What became of every planned rollout: a pure state machine that events drive, in replay as in life.

A finished rollout costs one byte; only unfinished ones of which an attempt was sent cost more. Replay order is events,
then outcomes, then dispatches: then nothing is remembered of a finished rollout longer than its line is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gymckpt.collection.events import (
    FROM_INPUT,
    CheckpointBegun,
    CheckpointFailed,
    CheckpointNamed,
    CheckpointPublished,
    CheckpointsRemoved,
    Dispatched,
    Event,
    Outcome,
    Reopened,
    Restored,
    RestoreFailed,
    RestoreIntended,
    Retired,
    Source,
)
from gymckpt.collection.history import Attempt, History, RolloutHistory
from gymckpt.errors import DamagedState
from gymckpt.identity import EpisodeId, checkpoint_sequence, make_rollout_id

NONE, SUCCEEDED, FAILED, OMITTED = range(4)
_CODES = {"succeeded": SUCCEEDED, "failed": FAILED, "omitted": OMITTED}
_OUTCOME = 0b11
_FREED = 0b100
MAX_UNCLEARED = 10_000
"""Only the newest finished rollouts are cleared again after a crash: what older ones left ends with their servers."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The four sets of a run, each counted on its own from ids."""

    planned: int
    succeeded: int
    failed: int
    omitted: int
    unresolved: int

    @property
    def complete(self) -> bool:
        return self.unresolved == 0


@dataclass(slots=True)
class _Rollout:
    attempts: dict[int, Source] = field(default_factory=dict)
    spent: int = -1
    failures: int = 0
    owner: str = ""
    replied: int = -1


class Run:
    """The state of one run. `rows` and `max_repeats` bound the ids that can occur; `planned` is how many do."""

    def __init__(self, run_id: str, *, planned: int, rows: int, max_repeats: int) -> None:
        self.run_id = run_id
        self.planned = planned
        self._prefix = f"{run_id[:8]}-"
        self._stride = max_repeats
        self._state = bytearray(rows * max_repeats)
        self._rollouts: dict[str, _Rollout] = {}
        self._openings: dict[str, int] = {}
        self._uncleared: dict[str, int] = {}
        self._counts = [0, 0, 0, 0]
        self._checkpoints: set[str] = set()
        self._open: set[str] = set()
        self.standing: dict[str, None] = {}
        """Checkpoints that were published and not removed since, oldest first."""
        self.named: dict[str, str] = {}
        """Those of them that bear a name, by id."""
        self.attempts = 0
        """Attempts dispatched, of all rollouts."""

    def rollout_id(self, task: int, repeat: int) -> str:
        return make_rollout_id(self.run_id, task, repeat)

    def place(self, rollout_id: str) -> tuple[int, int]:
        """(task, repeat) of a rollout of this run; raises `DamagedState` for any other id."""
        try:
            if not rollout_id.startswith(self._prefix):
                raise ValueError(rollout_id)
            task, repeat = map(int, rollout_id[len(self._prefix) :].split("-"))
            if not 0 <= repeat < self._stride or not 0 <= task < len(self._state) // self._stride:
                raise ValueError(rollout_id)
        except ValueError:
            raise DamagedState(f"{rollout_id[:160]!r} is no rollout of run {self.run_id}") from None
        return task, repeat

    def _index(self, rollout_id: str) -> int:
        task, repeat = self.place(rollout_id)
        return task * self._stride + repeat

    # Reading

    @property
    def counts(self) -> Counts:
        succeeded, failed, omitted = self._counts[SUCCEEDED], self._counts[FAILED], self._counts[OMITTED]
        return Counts(self.planned, succeeded, failed, omitted, self.planned - succeeded - failed - omitted)

    def recount(self) -> Counts:
        """The four sets counted afresh from every id, `unresolved` from what was planned and never ended."""
        ended = [sum(1 for state in self._state if state & _OUTCOME == code) for code in range(4)]
        return Counts(self.planned, ended[SUCCEEDED], ended[FAILED], ended[OMITTED], self.planned - sum(ended[1:]))

    def outcome(self, rollout_id: str) -> int:
        """`NONE`, `SUCCEEDED`, `FAILED` or `OMITTED`."""
        return self._state[self._index(rollout_id)] & _OUTCOME

    def finished(self, task: int, repeat: int) -> bool:
        return bool(self._state[task * self._stride + repeat] & _OUTCOME)

    def finished_in(self, first_task: int, last_task: int) -> int:
        """How many rollouts of these tasks (both included) have an outcome."""
        span = self._state[first_task * self._stride : (last_task + 1) * self._stride]
        return len(span) - sum(span.count(state) for state in (0, _FREED))

    def opening(self, rollout_id: str) -> int:
        return self._openings.get(rollout_id, 0)

    def failures(self, rollout_id: str) -> int:
        """Failures of the rollout itself in this opening."""
        rollout = self._rollouts.get(rollout_id)
        return rollout.failures if rollout else 0

    def last_attempt(self, rollout_id: str) -> int:
        """The highest attempt that anyone may have heard of; -1 for none."""
        rollout = self._rollouts.get(rollout_id)
        return max(rollout.attempts, default=-1) if rollout else -1

    def ended(self, episode: EpisodeId) -> bool:
        """Whether what became of this attempt is durable."""
        rollout = self._rollouts.get(episode.rollout_id)
        if rollout is None:
            return self.outcome(episode.rollout_id) != NONE
        return episode.attempt <= max(rollout.spent, rollout.replied)

    def replied(self, rollout_id: str) -> int:
        """The last attempt with which this member of a cohort replied, while the cohort is not whole; -1 for none."""
        rollout = self._rollouts.get(rollout_id)
        return rollout.replied if rollout else -1

    def owner(self, rollout_id: str) -> str:
        """The instance that the last dispatched attempt of this unfinished rollout went to; empty for none."""
        rollout = self._rollouts.get(rollout_id)
        return rollout.owner if rollout else ""

    def sent(self, rollout_id: str) -> bool:
        """Whether an attempt of this unfinished rollout was ever dispatched or intended."""
        return rollout_id in self._rollouts

    def unresolved_ids(self) -> Iterator[str]:
        """Unfinished rollouts of which an attempt was sent."""
        return iter(self._rollouts)

    def bearer(self, name: str) -> str | None:
        """The checkpoint that bears `name`, if one does."""
        return next((checkpoint_id for checkpoint_id, borne in self.named.items() if borne == name), None)

    def history(self) -> History:
        """What a recovery needs to know."""
        unfinished = {
            rollout_id: RolloutHistory(
                rollout_id,
                tuple(Attempt(number, rollout.attempts[number]) for number in sorted(rollout.attempts)),
                rollout.spent,
            )
            for rollout_id, rollout in self._rollouts.items()
            if rollout.attempts
        }
        uncleared = tuple(EpisodeId(rollout_id, attempt) for rollout_id, attempt in self._uncleared.items())
        return History(self.run_id, unfinished, uncleared, frozenset(self._checkpoints), frozenset(self._open))

    def next_sequence(self) -> int:
        """A sequence number above that of every checkpoint and restore so far."""
        return max(map(checkpoint_sequence, self._checkpoints), default=0) + 1

    # Driving

    def apply(self, event: Event) -> None:
        """Take one event into account."""
        match event:
            case Outcome():
                self._apply_outcome(event)
            case Dispatched(episode, owner, source):
                self.attempts += 1
                if (rollout := self._heard(episode, source)) is not None:
                    rollout.owner = owner
            case RestoreIntended(restore_id, checkpoint_id, installs):
                self._begin(restore_id)
                for install in installs:
                    episode = EpisodeId(install.rollout_id, install.installed)
                    self._heard(episode, Source(checkpoint_id, install.recorded))
            case Reopened():
                self._reopen(event)
            case Retired(episodes, forgotten) if forgotten:
                for episode in episodes:
                    self._state[self._index(episode.rollout_id)] |= _FREED
                    self._uncleared.pop(episode.rollout_id, None)
            case CheckpointBegun(checkpoint_id):
                self._begin(checkpoint_id)
            case CheckpointPublished(checkpoint_id):
                self._open.discard(checkpoint_id)
                self.standing[checkpoint_id] = None
            case CheckpointsRemoved(checkpoint_ids):
                for checkpoint_id in checkpoint_ids:
                    self.standing.pop(checkpoint_id, None)
                    self.named.pop(checkpoint_id, None)
            case CheckpointFailed(checkpoint_id, _):
                self._open.discard(checkpoint_id)
            case Restored(restore_id, _) | RestoreFailed(restore_id, _):
                self._open.discard(restore_id)
            case CheckpointNamed(checkpoint_id, name, _) if name:
                self.named[checkpoint_id] = name
            case _:
                pass

    def _begin(self, checkpoint_id: str) -> None:
        self._checkpoints.add(checkpoint_id)
        self._open.add(checkpoint_id)

    def _heard(self, episode: EpisodeId, source: Source = FROM_INPUT) -> _Rollout | None:
        if self.outcome(episode.rollout_id) != NONE:
            return None
        rollout = self._rollouts.setdefault(episode.rollout_id, _Rollout())
        rollout.attempts.setdefault(episode.attempt, source)
        return rollout

    def _apply_outcome(self, event: Outcome) -> None:
        rollout_id = event.episode.rollout_id
        index = self._index(rollout_id)
        if event.opening != self.opening(rollout_id) or self._state[index] & _OUTCOME:
            return
        if not event.final:
            self._heard(event.episode)
            rollout = self._rollouts[rollout_id]
            if event.outcome == "succeeded":
                rollout.replied = max(rollout.replied, event.episode.attempt)
                return
            rollout.failures += 1
            rollout.spent = max(rollout.spent, event.episode.attempt)
            return
        code = _CODES[event.outcome]
        self._state[index] |= code
        self._counts[code] += 1
        self._rollouts.pop(rollout_id, None)
        if not self._state[index] & _FREED:
            self._uncleared[rollout_id] = event.episode.attempt
            if len(self._uncleared) > MAX_UNCLEARED:
                del self._uncleared[next(iter(self._uncleared))]

    def _reopen(self, event: Reopened) -> None:
        index = self._index(event.rollout_id)
        if (code := self._state[index] & _OUTCOME) != NONE:
            self._counts[code] -= 1
        self._state[index] = 0
        self._openings[event.rollout_id] = event.opening
        rollout = self._rollouts.setdefault(event.rollout_id, _Rollout())
        rollout.failures = 0
        rollout.spent = max(rollout.spent, event.attempt)
        if event.attempt >= 0:
            rollout.attempts.setdefault(event.attempt, FROM_INPUT)
