"""A collector's memory without its files: what checkpointing and recovery ask of their host, for tests."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gymckpt.collection import events
from gymckpt.collection.history import Attempt, History, RolloutHistory
from gymckpt.errors import NotAsAsked
from gymckpt.identity import EpisodeId
from gymckpt.ports import Deadline
from gymckpt.storage.journalfiles import Position


@dataclass
class MemoryHost:
    """Events are a list; nothing else survives a crash of the collector."""

    run_id: str = "0123456789abcdef0123456789abcdef"
    epoch: int = 1
    journal: list[events.Event] = field(default_factory=list)
    flying: dict[EpisodeId, str] = field(default_factory=dict)
    unsent: dict[EpisodeId, str] = field(default_factory=dict)
    replies: dict[EpisodeId, float | None] = field(default_factory=dict)
    """When the reply of an episode that ended comes (seconds from the question); None = its connection broke."""
    lock_lost: bool = False

    async def begin_checkpoint(self, restore: bool = False) -> str:
        begun = [event for event in self.journal if isinstance(event, events.CheckpointBegun)]
        checkpoint_id = f"ckpt-{len(begun) + 1:06d}-{self.epoch:08x}"
        self.journal.append(events.CheckpointBegun(checkpoint_id, restore))
        return checkpoint_id

    async def record(self, event: events.Event) -> None:
        await asyncio.sleep(0)
        self.journal.append(event)

    async def check_epoch(self) -> None:
        if self.lock_lost:
            raise NotAsAsked("another collector took the run")

    def in_flight(self) -> Mapping[EpisodeId, str]:
        return self.flying

    def restored_unsent(self) -> Mapping[EpisodeId, str]:
        return self.unsent

    async def wait_reply(self, episode: EpisodeId, deadline: Deadline) -> bool:
        reply_s = self.replies.get(episode, deadline.remaining_s + 1)
        if reply_s is None:
            return False
        await asyncio.sleep(min(reply_s, deadline.remaining_s))
        return not deadline.passed

    def journal_positions(self) -> Mapping[str, Position]:
        return {"events": Position("events-1-1", 0, len(self.journal))}

    def said(self, kind: type[events.Event]) -> list[Any]:
        """The events of one kind, in order."""
        return [event for event in self.journal if isinstance(event, kind)]

    def history(self) -> History:
        """As `collection.run` makes it, without outcomes."""
        rollouts: dict[str, RolloutHistory] = {}
        ids: dict[str, bool] = {}
        for event in self.journal:
            match event:
                case events.Dispatched(episode, _, source):
                    _learn(rollouts, episode, source)
                case events.RestoreIntended(_, checkpoint_id, installs):
                    for install in installs:
                        episode = EpisodeId(install.rollout_id, install.installed)
                        _learn(rollouts, episode, events.Source(checkpoint_id, install.recorded))
                case events.CheckpointBegun(checkpoint_id):
                    ids[checkpoint_id] = True
                case events.CheckpointPublished(checkpoint_id) | events.CheckpointFailed(checkpoint_id):
                    ids[checkpoint_id] = False
                case events.Restored(restore_id) | events.RestoreFailed(restore_id):
                    ids[restore_id] = False
                case events.Outcome(episode, final=True):
                    rollouts.pop(episode.rollout_id, None)
                case _:
                    pass
        return History(self.run_id, rollouts, (), frozenset(ids), frozenset(k for k, is_open in ids.items() if is_open))


def _learn(rollouts: dict[str, RolloutHistory], episode: EpisodeId, source: events.Source) -> None:
    before = rollouts.get(episode.rollout_id, RolloutHistory(episode.rollout_id, ()))
    if all(attempt.number != episode.attempt for attempt in before.attempts):
        attempts = (*before.attempts, Attempt(episode.attempt, source))
        rollouts[episode.rollout_id] = replace(before, attempts=attempts)
