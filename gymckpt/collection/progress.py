"""What a display shows of a running collection, and the events it may print."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from gymckpt.collection.run import Counts
from gymckpt.identity import EpisodeId

OnEvent: TypeAlias = Callable[[dict[str, Any]], None]
"""Called on the event loop with each JSON event of `collect --json`; must not block."""


@dataclass(frozen=True, slots=True)
class LastCheckpoint:
    """The newest checkpoint of this process or of the run. `at` is unix seconds."""

    checkpoint_id: str
    at: float
    episodes: int
    restarts: int
    size_bytes: int
    pause_s: float
    commit_s: float


@dataclass(frozen=True, slots=True)
class SlowEpisode:
    """An attempt in flight and how long it has been so."""

    episode: EpisodeId
    owner: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot. Rates count only what this process did; restored and earlier work never enters them."""

    run_id: str
    directory: str
    counts: Counts
    in_flight: int
    """Requests under way."""
    parked: int
    """Of those in flight, how many wait because servers are closed for a checkpoint."""
    restored: int
    """Attempts of this process that continued from a checkpoint."""
    attempts: int
    """Attempts dispatched, of all processes: not samples."""
    finished_here: int
    elapsed_s: float
    rate_per_s: float
    """Rollouts finished by this process, over the last minutes."""
    eta_s: float | None
    """None while there is no rate."""
    last_checkpoint: LastCheckpoint | None
    next_checkpoint_s: float | None
    """Seconds until one is due by time; None where none will be."""
    checkpoint_failures: int
    """In a row."""
    missed_ticks: int
    free_bytes: int | None
    paused: tuple[str, ...]
    """Why nothing is dispatched right now, each in words."""
    slowest: tuple[SlowEpisode, ...]
    mean_reward: float | None
    """Over the rollouts that this process finished."""


class Rate:
    """Events a second over a sliding window, on the caller's clock."""

    def __init__(self, window_s: float = 120.0, buckets: int = 24) -> None:
        self._width_s = window_s / buckets
        self._buckets = buckets
        self._counts: dict[int, int] = {}
        self._first_s: float | None = None

    def start(self, now_s: float) -> None:
        """Begin to measure; time before it never counts."""
        self._first_s = now_s

    def add(self, now_s: float, count: int = 1) -> None:
        bucket = int(now_s // self._width_s)
        self._counts[bucket] = self._counts.get(bucket, 0) + count
        for old in [key for key in self._counts if key <= bucket - self._buckets]:
            del self._counts[old]

    def per_s(self, now_s: float) -> float:
        """The rate at `now_s`; 0 before anything happened."""
        if self._first_s is None:
            return 0.0
        newest = int(now_s // self._width_s)
        counted = sum(count for bucket, count in self._counts.items() if newest - self._buckets < bucket <= newest)
        since_s = max(self._first_s, (newest - self._buckets + 1) * self._width_s)
        return counted / (now_s - since_s) if now_s > since_s else 0.0
