"""What passes between a role and storage: records on their way out, records on their way back."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from gymckpt.identity import EpisodeId, Kind

Record: TypeAlias = dict[str, Any]
"""One episode's state in one participant, as JSON. Values and key order come back as they went in."""

Needs: TypeAlias = tuple[tuple[Kind, str], ...]
"""(kind, instance) of every participant that the remaining steps will call."""


class Boundary(msgspec.Struct, frozen=True, gc=False):
    """The point from which an episode can continue: the name of the next step, how many boundaries the rollout has
    completed (in environment and agent together, kept over restores), and when this one was recorded (unix seconds)."""

    step: str
    number: Annotated[int, msgspec.Meta(ge=0)]
    at: float

    def __str__(self) -> str:
        return f"{self.step}/{self.number}"


class ExportedRecord(msgspec.Struct, frozen=True, gc=False):
    """One episode on its way into a checkpoint.

    `record` may hold live append-only lists: `lists` names each by JSON pointer with its length at the snapshot, and
    storage reads no further than that. A role promises that such a list only grows for as long as the rollout lives
    here, restores included; one that shrank is written whole again.
    """

    episode: EpisodeId
    record: Record
    boundary: Boundary | None = None
    turns: int = 0
    """Delivered model calls."""
    needs: Needs | None = None
    revision: int | None = None
    """Unchanged revision of the same episode in the same process = unchanged record; None = compare the bytes."""
    lists: Mapping[str, int] = {}
    prefix: Mapping[str, Any] | None = None
    """The tokens of a call that was cut, kept beside the records; given anew with every export."""


class StoredRecord(msgspec.Struct, frozen=True, gc=False):
    """One episode read back. `episode` is the attempt that the checkpoint lists."""

    episode: EpisodeId
    record: Record
    boundary: Boundary | None = None
    turns: int = 0
    needs: Needs | None = None
    prefix: Mapping[str, Any] | None = None
