"""A floor under test, with everything that happens on it written down."""

import asyncio
from dataclasses import dataclass, field
from functools import partial

from gymckpt.episodes.boundary import Pin, Snapshot
from gymckpt.episodes.floor import Floor
from gymckpt.episodes.steps import Mode, Track
from gymckpt.episodes.time_limit import TimeLimit
from gymckpt.errors import ServerError
from gymckpt.identity import EpisodeId
from gymckpt.participant.admission import Gate
from tests.simulation.clock import VirtualClock


@dataclass(frozen=True)
class Step:
    """One step of a scripted episode."""

    mode: Mode
    takes_s: float
    fails: bool = False


@dataclass
class Scripted:
    """An episode that takes scripted steps; its state is the list of those it has taken."""

    name: str
    steps: list[Step]
    floor: Floor
    clock: VirtualClock
    limit_s: float | None = None
    taken: list[int] = field(default_factory=list)
    begun_closed: int = 0
    active_s: float = 0.0

    def __post_init__(self) -> None:
        limit = TimeLimit(self.clock, self.limit_s)
        self.track = Track(self.floor, self.clock, EpisodeId(self.name), limit)

    async def run(self) -> None:
        """Take every step that is left, again after one that failed."""
        while len(self.taken) < len(self.steps):
            number = len(self.taken)
            step = self.steps[number]
            try:
                await self.track.step(str(number), step.mode, partial(self._work, step))
            except ServerError:
                self.steps[number] = Step(step.mode, step.takes_s)
                continue
            self.taken.append(number)
            pin = Pin.of(self.taken)
            self.track.record(str(number + 1), partial(Snapshot, {"taken": pin.items}, {"/taken": pin.length}))
        await self.track.park()
        self.track.end()

    async def _work(self, step: Step) -> None:
        self.begun_closed += not self.floor.is_open
        await asyncio.sleep(step.takes_s)
        if step.fails:
            raise ServerError("as scripted")

    @property
    def exported(self) -> list[int] | None:
        """The steps that the boundary which counts says were taken; None without one."""
        point = self.track.exported
        if point is None:
            return None
        snapshot = point.snapshot()
        taken: list[int] = snapshot.state["taken"][: snapshot.lists["/taken"]]
        assert point.boundary.number == len(taken)
        return taken


def new_floor() -> Floor:
    """Open, and empty."""
    gate = Gate()
    return Floor(gate, gate.changed.notify)
