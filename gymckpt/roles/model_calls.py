"""What a policy model server keeps of calls and rollouts while they live."""

import asyncio
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gymckpt.identity import EpisodeId
from gymckpt.ports import Reply
from gymckpt.roles.ledger_rows import CallFacts
from gymckpt.roles.model_backends import Backend
from gymckpt.roles.model_cuts import Cut
from gymckpt.wire.responses import Route

Stage = Literal["waiting", "running", "held", "sending"]


@dataclass(slots=True, eq=False)
class Call:
    """One call of a rollout, from its arrival until its response was sent."""

    episode: EpisodeId
    route: Route
    body: Mapping[str, Any]
    call_id: str
    stage: Stage = "waiting"
    facts: CallFacts | None = None
    backend: Backend | None = None
    """The one that has it."""
    task: "asyncio.Task[Delivery] | None" = None
    retired: bool = False


@dataclass(slots=True)
class Rollout:
    """One attempt that is served here."""

    episode: EpisodeId
    revision: int
    """Changes with whatever the export says of it."""
    restored: bool = False
    """Installed, and no call of it has come yet."""
    restart: bool = False
    """Some server cannot capture the episode: it is never exported, and never blocks."""
    next_index: int = 0
    delivered: "array[int]" = field(default_factory=lambda: array("I"))
    """Positions in the ledger of the calls whose responses were begun to be sent, in that order. It only grows."""
    cut: Cut | None = None
    """What was restored of a call that has no response yet."""
    exported_cut: Cut | None = None
    """The one in the last export."""
    ready: "asyncio.Future[None] | None" = None
    """Done once what a dead execution left in the ledger is out of the way."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A response that may go out now. Call `sent` when it has, however that went."""

    reply: Reply
    sent: Callable[[], None]
