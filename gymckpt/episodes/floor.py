"""The floor: where all episodes of one server stand, and what a closing gate means for each of them."""

from collections.abc import Callable, Collection
from typing import Protocol

from gymckpt.episodes.steps import Track


class Door(Protocol):
    """What lets episodes go on from their boundaries; `participant.admission.Gate` is one."""

    @property
    def is_open(self) -> bool: ...

    def close(self) -> None: ...

    def open(self) -> None: ...

    async def wait_open(self) -> None:
        """Return while it is open."""
        ...


class Floor:
    """The tracks of one server. `changed` is called whenever what blocks may have changed."""

    def __init__(self, door: Door, changed: Callable[[], None] = lambda: None) -> None:
        self.door = door
        self.changed = changed
        self.closings = 0
        """How often the door was closed: a name for the checkpoint that is open, if one is."""
        self._tracks: set[Track] = set()
        self._restarts: frozenset[str] = frozenset()
        self._later: set[Track] = set()

    @property
    def is_open(self) -> bool:
        return self.door.is_open

    def close(self) -> None:
        """Let nobody leave a boundary; the set of restarts is frozen. Safe to repeat."""
        if not self.door.is_open:
            return
        self._restarts = frozenset(self._names_of_restarts())
        self.closings += 1
        self.door.close()
        for track in self._tracks:
            track.floor_closed()

    def open(self) -> None:
        """Let everybody go on; whoever was to become a restart meanwhile is one now. Safe to repeat."""
        if self.door.is_open:
            return
        self.door.open()
        for track in self._later:
            track.restart = True
        self._later.clear()
        for track in self._tracks:
            track.floor_opened()
        self.changed()

    def blockers(self) -> list[str]:
        """Names of the episodes in a step that a checkpoint has to wait for, sorted."""
        return sorted(str(track.episode) for track in self._tracks if track.blocks)

    def restarts(self) -> Collection[str]:
        """Names of the episodes that start over after a crash; as it was at the closing while closed."""
        return sorted(self._names_of_restarts()) if self.is_open else sorted(self._restarts)

    def counts(self) -> dict[str, int]:
        """How many episodes stand where."""
        found = {"parked": 0, "replay": 0, "wait": 0}
        for track in self._tracks:
            found[track.place] = found.get(track.place, 0) + 1
        return found

    def becomes_restart(self, track: Track) -> None:
        """Make it a restart, or note it until the door opens: sets do not change in the middle of a checkpoint."""
        track.will_restart = True
        if self.is_open:
            track.restart = True
            self.changed()
        else:
            self._later.add(track)

    def enter(self, track: Track) -> None:
        self._tracks.add(track)
        self.changed()

    def leave(self, track: Track) -> None:
        self._tracks.discard(track)
        self._later.discard(track)
        self.changed()

    def _names_of_restarts(self) -> list[str]:
        return [str(track.episode) for track in self._tracks if track.restart]
