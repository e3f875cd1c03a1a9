"""What the journals say about unfinished work: all that a recovery needs to know, and nothing of how it was stored."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gymckpt.collection.events import FROM_INPUT, Install, Source
from gymckpt.identity import EpisodeId, checkpoint_sequence


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt that was dispatched, or that a restore intended to install (and may have)."""

    number: int
    source: Source = FROM_INPUT


@dataclass(frozen=True, slots=True)
class RolloutHistory:
    """A rollout without a final outcome of which at least one attempt was dispatched or intended."""

    rollout_id: str
    attempts: tuple[Attempt, ...]
    """Ascending, none missing that any server may have heard of."""
    spent: int = -1
    """The highest attempt that came to an end of its own (it failed, or the user reopened the rollout after it):
    nothing at or below it is ever continued. -1 = none."""

    @property
    def last(self) -> EpisodeId:
        """The last attempt ever dispatched or installed."""
        return EpisodeId(self.rollout_id, self.attempts[-1].number)

    def continues(self, checkpoint_id: str, recorded: int) -> bool:
        """Whether attempt `recorded` in that checkpoint is where the rollout still stands or came from: it was not
        spent, and every later attempt descends from it."""
        by_number = {attempt.number: attempt for attempt in self.attempts}
        if recorded <= self.spent or recorded not in by_number:
            return False
        return all(
            self._descends(attempt, checkpoint_id, recorded, by_number)
            for attempt in self.attempts
            if attempt.number > recorded
        )

    def _descends(self, attempt: Attempt, checkpoint_id: str, recorded: int, known: Mapping[int, Attempt]) -> bool:
        while attempt.number > recorded:
            source = attempt.source
            if source.checkpoint_id is None or source.attempt is None:
                return False
            if not _same_or_newer(source.checkpoint_id, checkpoint_id):
                return False
            if source.attempt >= attempt.number or source.attempt not in known:
                return False
            attempt = known[source.attempt]
        return attempt.number == recorded

    def installed(self, checkpoint_id: str, install: Install) -> "RolloutHistory":
        """The history once a restore is intended that makes `install.installed` of `install.recorded`."""
        new = Attempt(install.installed, Source(checkpoint_id, install.recorded))
        return replace(self, attempts=(*self.attempts, new))


def _same_or_newer(checkpoint_id: str, than: str) -> bool:
    return checkpoint_id == than or checkpoint_sequence(checkpoint_id) > checkpoint_sequence(than)


@dataclass(frozen=True, slots=True)
class History:
    """What a run did so far, as far as a recovery is concerned."""

    run_id: str
    unfinished: Mapping[str, RolloutHistory] = field(default_factory=dict)
    """By rollout id; rollouts of which no attempt was ever dispatched are not here."""
    uncleared: tuple[EpisodeId, ...] = ()
    """Last attempts of rollouts with a final outcome that servers may still hold state of: not known as forgotten."""
    checkpoint_ids: frozenset[str] = frozenset()
    """Every id this run ever took, for a checkpoint or a restore."""
    open_ids: frozenset[str] = frozenset()
    """Those of them without a recorded end: a late call of theirs may still be under way."""

    def intended(self, checkpoint_id: str, installs: tuple[Install, ...]) -> "History":
        """The history once a restore from `checkpoint_id` with these installs is durably intended."""
        unfinished = dict(self.unfinished)
        for install in installs:
            unfinished[install.rollout_id] = unfinished[install.rollout_id].installed(checkpoint_id, install)
        return replace(self, unfinished=unfinished)
