"""What to do about a rollout that keeps checkpoints from being taken. Pure memory, no I/O."""

from collections.abc import Collection

from gymckpt.errors import InvalidRolloutId
from gymckpt.identity import EpisodeId

MISSES_BEFORE_RETIRE = 2
"""So many prepares in a row must miss because of one rollout alone before it is retired for it."""


def blocking_episodes(names: Collection[str]) -> tuple[EpisodeId, ...]:
    """The episodes among blockers' names; a name such as `<POST /v1/responses>` stands for a request without one."""
    episodes: list[EpisodeId] = []
    for name in names:
        try:
            episodes.append(EpisodeId.parse(name))
        except InvalidRolloutId:
            continue
    return tuple(dict.fromkeys(episodes))


class BlockerMemory:
    """Remembers who alone blocked. A rollout is retired for it at most once; if it blocks alone again, ticks are
    skipped for as long as that attempt is in flight."""

    def __init__(self) -> None:
        self._alone: str | None = None
        self._misses = 0
        self._retired: set[str] = set()
        self._given_up: set[EpisodeId] = set()

    def missed(self, names: Collection[str]) -> EpisodeId | None:
        """A prepare missed because of these blockers. Gives the episode to retire for it, if that time has come."""
        episodes = blocking_episodes(names)
        rollouts = {episode.rollout_id for episode in episodes}
        if len(rollouts) != 1 or len(set(names)) != len(episodes):
            self.succeeded()
            return None
        episode = max(episodes)
        self._misses = self._misses + 1 if self._alone == episode.rollout_id else 1
        self._alone = episode.rollout_id
        if self._misses < MISSES_BEFORE_RETIRE:
            return None
        if episode.rollout_id in self._retired:
            self._given_up.add(episode)
            return None
        self._retired.add(episode.rollout_id)
        self.succeeded()
        return episode

    def succeeded(self) -> None:
        """Nobody blocks alone any more."""
        self._alone, self._misses = None, 0

    def in_the_way(self, in_flight: Collection[EpisodeId]) -> EpisodeId | None:
        """The episode for which this tick is skipped, if there is one."""
        self._given_up.intersection_update(in_flight)
        return min(self._given_up, default=None)
