"""What this process did so far: numbers for a display, and nothing that decides anything."""

from gymckpt.collection.checkpointing import CheckpointTaken
from gymckpt.collection.events import Outcome
from gymckpt.collection.progress import LastCheckpoint, Rate
from gymckpt.ports import Clock


class Tally:
    """Counts of this process, on its clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begun_s = clock.monotonic()
        self.rate = Rate()
        self.rate.start(self.begun_s)
        self.finished_here = 0
        self.restored = 0
        self.rewards = 0.0
        self.rewarded = 0
        self.checkpoint_failures = 0
        """In a row."""
        self.last_checkpoint: LastCheckpoint | None = None
        self.free_bytes: int | None = None

    def finished(self, outcome: Outcome) -> None:
        """A rollout came to its outcome."""
        self.finished_here += 1
        self.rate.add(self._clock.monotonic())
        if outcome.reward is not None:
            self.rewards += outcome.reward
            self.rewarded += 1

    def published(self, taken: CheckpointTaken) -> None:
        """A checkpoint stands."""
        self.checkpoint_failures = 0
        self.last_checkpoint = LastCheckpoint(
            checkpoint_id=taken.checkpoint_id,
            at=self._clock.time(),
            episodes=taken.episodes,
            restarts=taken.restarts,
            size_bytes=taken.size_bytes,
            pause_s=taken.pause_s,
            commit_s=taken.commit_s,
        )

    @property
    def mean_reward(self) -> float | None:
        return self.rewards / self.rewarded if self.rewarded else None
