"""The episodes that one server owns (it received their `/run`): who may start, and what waits restored.

The rules are the same for an environment server and for an agent server that is sent flat rows.
"""

from collections.abc import Collection, Iterator
from typing import Any, Generic, Protocol, TypeVar

from gymckpt.episodes.driver import Driver
from gymckpt.episodes.steps import Track
from gymckpt.errors import CheckpointConflict, CheckpointFailed, StaleAttempt
from gymckpt.identity import EpisodeId
from gymckpt.participant.marks import Marks


class Owned(Protocol):
    """A running episode."""

    episode: EpisodeId
    track: Track
    driver: Driver[dict[str, Any]]


class Waiting(Protocol):
    """A restored episode, as its record says."""

    @property
    def task_digest(self) -> str: ...


E = TypeVar("E", bound=Owned)
R = TypeVar("R", bound=Waiting)


class OwnedEpisodes(Generic[E, R]):
    """Running episodes, and restored ones until their replacement truly starts."""

    def __init__(self, marks: Marks, *, checkpointing: bool) -> None:
        self._marks = marks
        self._checkpointing = checkpointing
        self._running: dict[str, dict[int, E]] = {}
        self._restored: dict[str, tuple[EpisodeId, R]] = {}

    def __iter__(self) -> Iterator[E]:
        """Every episode whose steps have not ended."""
        running = [one for attempts in self._running.values() for one in attempts.values()]
        return iter([one for one in running if one.driver.in_steps])

    @property
    def restored(self) -> list[tuple[EpisodeId, R]]:
        """Restored episodes that wait for their replacement's `/run`."""
        return list(self._restored.values())

    def claim(self, episode: EpisodeId, task_digest: str) -> R | None:
        """What `episode` continues from, None from the beginning. Changes nothing.

        Raises `StaleAttempt`, `CheckpointConflict` (already running), `CheckpointFailed` (restored with another task).
        """
        self._marks.check(episode)
        attempts = self._running.get(episode.rollout_id, {})
        live = [one.episode.attempt for one in attempts.values() if one.driver.in_steps]
        if episode.attempt in live:
            raise CheckpointConflict(f"episode {episode} is already running")
        if any(attempt > episode.attempt for attempt in live):
            raise StaleAttempt(f"a later attempt than {episode} is running")
        waiting = self._restored.get(episode.rollout_id)
        if waiting is None or episode.attempt > waiting[0].attempt:
            return None
        installed, restored = waiting
        if episode.attempt < installed.attempt:
            raise StaleAttempt(f"{installed} was restored here, {episode} is older")
        if restored.task_digest != task_digest:
            raise CheckpointFailed(
                f"{episode} was restored with another task", hint="send the row that the rollout began with"
            )
        return restored

    def started(self, one: E) -> None:
        """`one` runs: its restored record goes, and earlier attempts have no effect from now on."""
        episode = one.episode
        attempts = self._running.setdefault(episode.rollout_id, {})
        if self._checkpointing and episode.attempt > 0:
            self._marks.raise_mark(EpisodeId(episode.rollout_id, episode.attempt - 1))
        for earlier in attempts.values():
            earlier.driver.cancel()
        self._restored.pop(episode.rollout_id, None)
        attempts[episode.attempt] = one
        one.driver.when_gone(lambda: self._remove(one))

    def install(self, episode: EpisodeId, restored: R) -> None:
        """A checked record, under the attempt that will continue it."""
        self._restored[episode.rollout_id] = (episode, restored)

    def drop_restored(self, keep: Collection[EpisodeId]) -> None:
        """Forget what was restored and is not in `keep`."""
        self._restored = {rollout: (e, r) for rollout, (e, r) in self._restored.items() if e in keep}

    def stop(self, episode: EpisodeId) -> list[E]:
        """Cancel this and every earlier attempt of the rollout once; await `driver.gone()` of those given back."""
        waiting = self._restored.get(episode.rollout_id)
        if waiting is not None and waiting[0].attempt <= episode.attempt:
            del self._restored[episode.rollout_id]
        attempts = self._running.get(episode.rollout_id, {})
        covered = [one for attempt, one in attempts.items() if attempt <= episode.attempt]
        for one in covered:
            one.driver.cancel()
        return covered

    def live(self) -> list[str]:
        """Capture keys of everything that is here, episodes in their clean-up too."""
        running = [str(one.episode) for attempts in self._running.values() for one in attempts.values()]
        return running + [str(episode) for episode, _ in self._restored.values()]

    async def aclose(self) -> None:
        """Stop everything without clean-up: the process ends."""
        running = [one for attempts in self._running.values() for one in attempts.values()]
        for one in running:
            one.driver.abandon()
        for one in running:
            await one.driver.gone()

    def _remove(self, ended: E) -> None:
        attempts = self._running.get(ended.episode.rollout_id, {})
        if attempts.get(ended.episode.attempt) is ended:
            del attempts[ended.episode.attempt]
            if not attempts:
                del self._running[ended.episode.rollout_id]
