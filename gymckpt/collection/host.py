"""What checkpointing and recovery ask of the collector that hosts them: its journals, its lock, its replies."""

from collections.abc import Mapping
from typing import Protocol

from gymckpt.collection.events import Event
from gymckpt.collection.history import History
from gymckpt.identity import EpisodeId
from gymckpt.ports import Deadline
from gymckpt.storage.journalfiles import Position


class JournalHost(Protocol):
    """The collector's durable memory."""

    @property
    def run_id(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    async def begin_checkpoint(self, restore: bool = False) -> str:
        """A new id, durable in the events journal before it is given."""
        ...

    async def record(self, event: Event) -> None:
        """Return once `event` is durable and part of `history()`."""
        ...

    async def check_epoch(self) -> None:
        """Raise `NotAsAsked` if another process took the run."""
        ...


class CheckpointHost(JournalHost, Protocol):
    """What a checkpoint needs to know about the running collection."""

    def in_flight(self) -> Mapping[EpisodeId, str]:
        """Attempts whose `/run` was sent and has no durable outcome yet, with the instance that received it. An attempt
        that was refused as not started is not in flight until it is sent again."""
        ...

    def restored_unsent(self) -> Mapping[EpisodeId, str]:
        """Attempts that a restore installed and whose `/run` was not sent yet, with the instance that it will go to."""
        ...

    async def wait_reply(self, episode: EpisodeId, deadline: Deadline) -> bool:
        """True once the `/run` reply of an attempt in flight came and its outcome (or a cohort member's reply) is
        durable; False at the deadline, or at once when its request failed or turned out not to be started."""
        ...

    def journal_positions(self) -> Mapping[str, Position]:
        """How far each journal is durable."""
        ...


class RecoveryHost(JournalHost, Protocol):
    """What a recovery needs to know about the run so far."""

    def history(self) -> History:
        """What the journals say now, every recorded event included."""
        ...
