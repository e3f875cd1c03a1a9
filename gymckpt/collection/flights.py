"""One attempt under way: where it stands, and who waits for its reply."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from gymckpt.collection.events import Source
from gymckpt.identity import EpisodeId


@dataclass(eq=False)
class Flight:
    """An attempt from its dispatch event to its durable outcome.

    `sent`: its request left, and was not refused as not started. Times are of the clock's `monotonic`.
    """

    task: int
    repeat: int
    episode: EpisodeId
    owner: str
    source: Source
    row: dict[str, Any]
    begun_s: float
    closed_s: float
    """How long the servers had been closed in all when it began."""
    round: int = 0
    """Of its cohort."""
    sent: bool = False
    large: bool = False
    """Its reply is too large to be handled on the event loop."""
    replied: bool = False
    """As a member of a cohort: its reply is durable, and waits for those of the others."""
    committing: bool = False
    """Its reply came and its outcome is being made durable: it is no longer cut short."""
    abandoned: str | None = None
    """Why it is given up although its request may still run."""
    limit: asyncio.Timeout | None = None
    _waiters: list["asyncio.Future[bool]"] = field(default_factory=list)

    @property
    def under_way(self) -> bool:
        """Its request left and neither reply nor refusal has settled it."""
        return self.sent and not self.replied

    @property
    def restored_unsent(self) -> bool:
        """A restore installed it, and its request did not leave or was refused as not started."""
        return not self.sent and not self.source.is_input

    def cut_short(self, reason: str | None) -> None:
        """Stop waiting for the reply, or do not send it: `reason` if it is given up, None if its time is over."""
        if self.committing:
            return
        if self.limit is not None:
            self.abandoned = reason
            self.limit.reschedule(asyncio.get_running_loop().time())
        elif not self.sent:
            self.abandoned = reason

    def wait(self) -> "asyncio.Future[bool]":
        """A future that says whether a reply came whose outcome is durable."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        return future

    def settle(self, replied: bool) -> None:
        """Tell everyone who waits."""
        for future in self._waiters:
            if not future.done():
                future.set_result(replied)
        self._waiters.clear()
