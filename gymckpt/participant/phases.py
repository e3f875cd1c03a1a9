"""The states of a participant, as plain data: the fence, and the one checkpoint or restore that is active.

    idle -prepare-> preparing -ready-> prepared -commit-> committed -resume-> idle
    idle -restore-> restored -resume-> idle            resume from any phase is also the abort

A restore reads and checks while the phase is still idle, and is `preparing` while it installs.
"""

import asyncio
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from pydantic import BaseModel

from gymckpt.errors import CheckpointConflict
from gymckpt.identity import EpisodeId
from gymckpt.participant.export import Export
from gymckpt.wire.control import CommitReply, RestoreReply

FENCED_IDS = 64

Stored = Literal["prepare", "commit", "restore"]
"""Operations whose result is kept until resume."""

R = TypeVar("R", bound=BaseModel)


class Fence:
    """The last 64 checkpoint ids that were resumed: they can do nothing here any more."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def add(self, checkpoint_id: str) -> None:
        """Fence an id; the oldest one is let go beyond 64."""
        self._ids.pop(checkpoint_id, None)
        self._ids[checkpoint_id] = None
        if len(self._ids) > FENCED_IDS:
            del self._ids[next(iter(self._ids))]

    def __contains__(self, checkpoint_id: str) -> bool:
        return checkpoint_id in self._ids


@dataclass
class Commit:
    """A commit that has begun: bound to its arguments, exported once, written until it is done or stopped."""

    arguments: Hashable
    scope: frozenset[EpisodeId] | None
    suspends: bool
    export: Export | None = None
    """None until its directory was looked at."""
    task: asyncio.Task[CommitReply] | None = None
    settling: bool = False
    """The manifest is written; what is left changes the role, and is not cut short."""


@dataclass
class Restore:
    """A restore that has begun. `abandoned`: nobody wants it any more, and what it installs is dropped again."""

    arguments: Hashable
    wanted_until_s: float
    task: asyncio.Task[RestoreReply] | None = None
    installing: bool = False
    attempts: Mapping[str, int] = field(default_factory=dict)
    """What it installs, once it does."""
    abandoned: bool = False

    def abandon(self) -> None:
        """Reading stops at once; an install runs to its end first, so that it cannot race what follows."""
        self.abandoned = True
        if self.task is not None and not self.installing:
            self.task.cancel()


@dataclass
class Active:
    """The checkpoint or restore that holds the participant, from its first operation until it has ended."""

    checkpoint_id: str
    closed_at_s: float | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is resumed, expires, or fails: everyone who waits for a part of it gives up."""
    ending: asyncio.Task[None] | None = None
    commit: Commit | None = None
    restore: Restore | None = None
    suspended: tuple[EpisodeId, ...] = ()
    suspending: asyncio.Task[None] | None = None
    results: dict[Stored, tuple[Hashable, BaseModel]] = field(default_factory=dict)

    def store(self, operation: Stored, arguments: Hashable, reply: R) -> R:
        """Keep the reply of a completed operation, and give it back."""
        self.results[operation] = (arguments, reply)
        return reply

    def stored(self, operation: Stored, arguments: Hashable, reply: type[R]) -> R | None:
        """The kept reply; raises `CheckpointConflict` if it was given for other arguments."""
        if operation not in self.results:
            return None
        asked, result = self.results[operation]
        self.same(operation, asked, arguments)
        assert isinstance(result, reply)
        return result

    def same(self, operation: Stored, asked: Hashable, arguments: Hashable) -> None:
        """Raise `CheckpointConflict` unless `arguments` are the ones that the operation was first asked with."""
        if asked != arguments:
            raise CheckpointConflict(
                f"{operation} of {self.checkpoint_id} was asked for before with another directory, scope or stop"
            )
