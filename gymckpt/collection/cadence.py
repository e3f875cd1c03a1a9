"""When the next checkpoint is due. Pure: times are the clock's `monotonic`."""

from gymckpt.collection.options import Every


class Cadence:
    """Ticks of one `Every`. Missed ticks are counted, never queued: after a long checkpoint the next one is a whole
    period away."""

    def __init__(self, every: Every, now_s: float) -> None:
        self._every = every
        self._last_s = now_s
        self._finished_at_last = 0
        self.missed = 0

    def due_in_s(self, now_s: float) -> float | None:
        """Seconds until one is due by time (0 if it is); None if none ever is."""
        if self._every.seconds is None:
            return None
        return max(0.0, self._last_s + self._every.seconds - now_s)

    def due(self, now_s: float, finished: int) -> bool:
        """Whether one is due, with so many rollouts finished by this process."""
        by_count = self._every.episodes is not None and finished - self._finished_at_last >= self._every.episodes
        return by_count or self.due_in_s(now_s) == 0.0

    def ticked(self, begun_s: float, now_s: float, finished: int) -> None:
        """A tick was served, or skipped because nothing was in flight; it began at `begun_s` and is over now."""
        if self._every.seconds is not None:
            self.missed += int((now_s - begun_s) / self._every.seconds)
        self._last_s = now_s if now_s - begun_s > (self._every.seconds or 0.0) else begun_s
        self._finished_at_last = finished
