"""Boundaries: the points from which an episode can continue, as snapshots that cost nothing until they are exported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from gymckpt.storage.records import Boundary, Record


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State as JSON. It may hold live append-only lists: `lists` names each by JSON pointer with the length it had at
    the boundary, and nothing after that length belongs to the snapshot."""

    state: Record
    lists: Mapping[str, int] = field(default_factory=dict)

    def under(self, prefix: str) -> dict[str, int]:
        """The pinned lists, for a document that holds this state at the JSON pointer `prefix`."""
        return {prefix + pointer: length for pointer, length in self.lists.items()}


@dataclass(frozen=True, slots=True)
class Pin:
    """An append-only list with the length it has now."""

    items: list[Any]
    length: int

    @classmethod
    def of(cls, items: list[Any]) -> Self:
        return cls(items, len(items))


def pointer(*path: str | int) -> str:
    """The JSON pointer (RFC 6901) of a path of keys and indexes."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


@dataclass(frozen=True, slots=True)
class Point:
    """A boundary that an episode has reached. `snapshot` is evaluated only on export, however much later that is: it
    must give the state as it was when the boundary was recorded."""

    boundary: Boundary
    snapshot: Callable[[], Snapshot]
    turns: int = 0
    """Delivered model calls."""

    def as_json(self) -> Snapshot:
        """The boundary as it stands in a record: `{step, number, at, turns, state}`."""
        taken = self.snapshot()
        return Snapshot(
            {
                "step": self.boundary.step,
                "number": self.boundary.number,
                "at": self.boundary.at,
                "turns": self.turns,
                "state": taken.state,
            },
            taken.under("/state"),
        )


class BoundaryRecord(BaseModel):
    """A boundary read back from a record; its state is checked by whoever continues from it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: str = Field(max_length=128)
    number: int = Field(ge=0)
    at: float
    turns: int = Field(0, ge=0)
    state: dict[str, Any]

    def point(self, snapshot: Callable[[], Snapshot]) -> Point:
        """The restored boundary; `snapshot` gives its state as it was restored."""
        return Point(Boundary(self.step, self.number, self.at), snapshot, self.turns)
