"""Rollouts that count together: their verification waits for all of them, so none counts before each has replied.

A member's reply is durable at once, and the outcomes follow when the last one has replied. A crash between two of those
outcomes is made good from the replies in the journal; before the first one, all members run again. So they do when a
member fails after another has replied: that one's verdict is of a comparison that is over, and nobody would come to the
next one.
"""

import asyncio
from dataclasses import dataclass, field

from gymckpt.collection.feed import Batch
from gymckpt.collection.run import FAILED, SUCCEEDED, Run


@dataclass(eq=False)
class Cohort:
    """One cohort under way."""

    members: int
    replied: set[str] = field(default_factory=set)
    """Rollout ids whose reply is durable."""
    closing: bool = False
    """Every reply is in the journal: only outcomes are left to write."""
    failed: bool = False
    """A member failed for good: so do the others."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    round: int = 0
    """How often all members began again; whoever waited for `settled` looks at it."""

    def reply(self, rollout_id: str) -> None:
        """A member's reply is durable."""
        self.replied.add(rollout_id)
        if len(self.replied) == self.members:
            self.closing = True
            self.settled.set()

    def begin_again(self) -> None:
        """What has replied does not count, and what is under way belongs to a comparison that is over."""
        self.round += 1
        self.replied.clear()
        waiting, self.settled = self.settled, asyncio.Event()
        waiting.set()

    def fail(self) -> None:
        """A member failed for good."""
        self.failed = True
        self.settled.set()

    def run_again(self, rollout_id: str) -> None:
        """A member's next attempt begins: what it replied before does not count."""
        self.replied.discard(rollout_id)
        if not self.failed:
            self.settled.clear()


class Cohorts:
    """The cohorts under way, by rollout id of their members."""

    def __init__(self) -> None:
        self._by_rollout: dict[str, Cohort] = {}

    def admit(self, batch: Batch, run: Run) -> None:
        """Take up a batch; one that is no cohort leaves no trace."""
        if batch.cohort is None:
            return
        ids = [run.rollout_id(planned.task, planned.repeat) for planned in batch.members]
        ended = {run.outcome(run.rollout_id(task, repeat)) for task, repeat in batch.ended}
        closing = SUCCEEDED in ended and all(run.replied(rollout_id) >= 0 for rollout_id in ids)
        cohort = Cohort(len(ids), closing=closing, failed=FAILED in ended)
        self._by_rollout.update(dict.fromkeys(ids, cohort))

    def of(self, rollout_id: str) -> Cohort | None:
        """The cohort of this rollout, if it has one."""
        return self._by_rollout.get(rollout_id)

    def members(self, cohort: Cohort) -> set[str]:
        """Rollout ids of a cohort's members that are not done."""
        return {rollout_id for rollout_id, other in self._by_rollout.items() if other is cohort}

    def done(self, rollout_id: str) -> None:
        """The rollout has its outcome."""
        self._by_rollout.pop(rollout_id, None)
