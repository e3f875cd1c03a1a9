"""Steps: what an episode does between two boundaries, and where it counts while a checkpoint is open.

A step in mode `wait` is waited for: the episode parks at the boundary after it. In mode `replay` the episode counts as
parked at the boundary before it: the step goes on, and runs again after a crash. One that ends while a checkpoint is
open stays counted at the earlier boundary in that checkpoint, so that it agrees with what other servers have exported
by then; its new boundary counts from the next checkpoint on.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal, TypeVar

from gymckpt.episodes.boundary import Point, Snapshot
from gymckpt.episodes.time_limit import TimeLimit
from gymckpt.errors import GymckptError
from gymckpt.identity import EpisodeId
from gymckpt.ports import Clock
from gymckpt.storage.records import Boundary

if TYPE_CHECKING:
    from gymckpt.episodes.floor import Floor

T = TypeVar("T")

Mode = Literal["wait", "replay"]
Place = Literal["parked", "wait", "replay", "ended"]


class Track:
    """Where one episode stands. One task at a time drives it: `step`, then `record`, and so on until `end`.

    Between the return of `step` and the call of `record` there must be no `await`.
    """

    def __init__(
        self, floor: "Floor", clock: Clock, episode: EpisodeId, limit: TimeLimit, *, point: Point | None = None
    ) -> None:
        self.episode = episode
        self.limit = limit
        self.restart = False
        """It starts over after a crash: never exported, never waited for. Set through `Floor.becomes_restart`."""
        self.will_restart = False
        """It is one, or becomes one when the open checkpoint ends."""
        self.place: Place = "parked"
        self.number = point.boundary.number if point else 0
        """Boundaries that the rollout has completed."""
        self._floor = floor
        self._clock = clock
        self._point = point
        self._pinned: tuple[int, Point | None] | None = None
        floor.enter(self)

    @property
    def blocks(self) -> bool:
        """Whether a checkpoint has to wait for it."""
        return self.place == "wait" and not self.restart

    @property
    def exported(self) -> Point | None:
        """The boundary that counts in the open checkpoint; None if it has none and starts over."""
        if not self._floor.is_open and self._pinned is not None and self._pinned[0] == self._floor.closings:
            return self._pinned[1]
        return self._point

    async def park(self) -> None:
        """Stay at the boundary until the floor is open; one that wakes to find it closed again stays."""
        await self._floor.door.wait_open()

    async def step(self, name: str, mode: Mode, work: Callable[[], Awaitable[T]]) -> T:
        """Leave the boundary once the floor is open, and do `work` within the time limit.

        A replay step that fails while a checkpoint is open fails only when that one has ended. After a failure the
        episode stands at its boundary again.
        """
        await self.park()
        self._move(mode)
        self.limit.start()
        try:
            return await self.limit.run(name, work)
        except asyncio.CancelledError:
            self._back()
            raise
        except GymckptError:
            if mode == "replay":
                await self.park()
            self._back()
            raise

    def record(self, step: str, snapshot: Callable[[], Snapshot], *, turns: int = 0) -> None:
        """A new boundary, before `step`: the episode is parked there until it takes that step."""
        if not self._floor.is_open and self.place == "replay":
            self._pinned = (self._floor.closings, self.exported)
        self.number += 1
        self._point = Point(Boundary(step, self.number, self._clock.time()), snapshot, turns)
        self._back()

    def stay(self) -> None:
        """The step has ended, and makes no boundary: the one before it goes on to count. In place of `record`."""
        self._back()

    def counted(self, number: int) -> None:
        """Another server says that the rollout has completed `number` boundaries."""
        self.number = max(self.number, number)

    def end(self) -> None:
        """The episode is over: it is in no export and blocks nothing. Safe to repeat."""
        self.limit.stop()
        self.place = "ended"
        self._floor.leave(self)

    def floor_closed(self) -> None:
        """For the floor: the time of a replay step stands still while a checkpoint is open."""
        if self.place == "replay":
            self.limit.stop()

    def floor_opened(self) -> None:
        """For the floor: time goes on for whoever is in a step."""
        if self.place in ("replay", "wait"):
            self.limit.start()

    def _back(self) -> None:
        self.limit.stop()
        self._move("parked")

    def _move(self, place: Place) -> None:
        self.place = place
        self._floor.changed()
