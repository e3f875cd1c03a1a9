"""The episodes of one checkpoint, merged from the indexes of all its participants. Payloads are not read."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import cast

from gymckpt.errors import DamagedState
from gymckpt.identity import KINDS, EpisodeId, Kind
from gymckpt.ports import FileSystem, Offload
from gymckpt.report.documents import BoundaryView, EpisodeView
from gymckpt.storage.checkpoints import Collection as CutRecord
from gymckpt.storage.checkpoints import find_participants
from gymckpt.storage.index import IndexLine
from gymckpt.storage.published import PARTICIPANTS
from gymckpt.storage.reader import ParticipantReader
from gymckpt.storage.records import Boundary


@dataclass
class _Merged:
    boundaries: dict[Kind, Boundary] = field(default_factory=dict)
    kinds: set[Kind] = field(default_factory=set)
    turns: int = 0
    size_bytes: int = 0

    def add(self, kind: Kind, line: IndexLine) -> None:
        self.kinds.add(kind)
        self.turns = max(self.turns, line.turns)
        self.size_bytes += line.size_bytes
        if (boundary := line.boundary) is not None:
            self.boundaries[kind] = boundary

    @property
    def boundary(self) -> BoundaryView | None:
        """The owner's next step, with the number and time of the latest boundary: those inside the agent's loop count
        on while the environment waits for it."""
        owner = self.boundaries.get("environment") or self.boundaries.get("agent")
        if owner is None:
            return None
        latest = max(self.boundaries.values(), key=lambda boundary: boundary.number)
        return BoundaryView(step=owner.step, number=latest.number, at=latest.at)


def participants(fs: FileSystem, checkpoint: PurePath) -> list[tuple[Kind, str]]:
    """(kind, instance) of every participant that stored something in `checkpoint`. Blocking."""
    found = list(find_participants(fs, checkpoint))
    if not found:
        raise DamagedState(f"{checkpoint} holds no records of participants (no manifest below {PARTICIPANTS}/)")
    return found


async def open_participant(
    fs: FileSystem, offload: Offload, checkpoint: PurePath, kind: Kind, instance: str
) -> ParticipantReader:
    """A reader of one participant's part, opened; raises `DamagedState`."""
    directory = checkpoint / PARTICIPANTS / kind / instance
    reader = ParticipantReader(fs, offload, directory, kind=kind, instance=instance)
    await reader.open()
    return reader


async def list_episodes(
    fs: FileSystem, offload: Offload, checkpoint: PurePath, collection: CutRecord | None
) -> list[EpisodeView]:
    """The episodes of `checkpoint`, by rollout and attempt; raises `DamagedState`.

    With the controller's record: those that continue and those that start over, whether a participant holds something
    of the latter or not. Without (a directory that a trainer wrote): every episode that a participant holds.
    """
    reasons: dict[EpisodeId, str | None] = {}
    if collection is not None:
        reasons.update(dict.fromkeys(collection.continued))
        reasons.update({restarted.episode: restarted.reason for restarted in collection.restarted})
    merged: dict[EpisodeId, _Merged] = {episode: _Merged() for episode in reasons}
    for kind, instance in await offload.run(lambda: participants(fs, checkpoint)):
        reader = await open_participant(fs, offload, checkpoint, kind, instance)
        await offload.run(partial(_merge, merged, kind, reader))
    listed = merged if collection is None else reasons
    return [_view(episode, merged[episode], reasons.get(episode)) for episode in sorted(listed, key=_by_task)]


def _merge(merged: dict[EpisodeId, _Merged], kind: Kind, reader: ParticipantReader) -> None:
    for line in reader.index():
        merged.setdefault(line.episode, _Merged()).add(kind, line)


def _view(episode: EpisodeId, found: _Merged, restart: str | None) -> EpisodeView:
    return EpisodeView(
        rollout_id=episode.rollout_id,
        attempt=episode.attempt,
        boundary=found.boundary,
        turns=found.turns,
        bytes=found.size_bytes,
        restart=restart,
        kinds=in_order(found.kinds),
    )


def in_order(kinds: Collection[Kind]) -> list[str]:
    """The kinds as they are always listed."""
    return [cast(str, kind) for kind in KINDS if kind in kinds]


def _by_task(episode: EpisodeId) -> tuple[list[tuple[bool, int, str]], int]:
    # Numbers inside ids in their own order: run-2-0 before run-10-0.
    parts = [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in episode.rollout_id.split("-")]
    return parts, episode.attempt
