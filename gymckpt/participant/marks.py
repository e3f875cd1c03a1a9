"""Refusal marks: which attempts must never have an effect here again.

One integer a rollout: an attempt is refused when it is not above it. A mark outlives the retire that raised it, because
a request sent just before the retire, on another connection, can arrive after it; only `forget` drops it.
"""

from gymckpt.errors import StaleAttempt
from gymckpt.identity import EpisodeId


class Marks:
    """The marks of one participant, shared by its control plane (which raises them) and its role (which obeys them)."""

    def __init__(self) -> None:
        self._highest_refused: dict[str, int] = {}

    def raise_mark(self, episode: EpisodeId) -> None:
        """Refuse this attempt and every earlier one from now on. A mark never sinks."""
        refused = self._highest_refused.get(episode.rollout_id, -1)
        self._highest_refused[episode.rollout_id] = max(refused, episode.attempt)

    def refuses(self, episode: EpisodeId) -> bool:
        """Whether this attempt was retired, or a later one took its place."""
        return episode.attempt <= self._highest_refused.get(episode.rollout_id, -1)

    def check(self, episode: EpisodeId) -> None:
        """Raise `StaleAttempt` if this attempt is refused. Check again after every wait for admission."""
        if self.refuses(episode):
            raise StaleAttempt(f"episode {episode} was retired here, or a later attempt took its place")

    def holds(self, rollout_id: str) -> bool:
        """Whether any attempt of the rollout is refused."""
        return rollout_id in self._highest_refused

    def forget(self, rollout_id: str) -> None:
        """Drop the rollout's mark; right only once none of its attempts can run any more."""
        self._highest_refused.pop(rollout_id, None)

    @property
    def count(self) -> int:
        """Rollouts with a mark."""
        return len(self._highest_refused)
