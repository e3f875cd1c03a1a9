"""The episodes of one checkpoint, merged from the indexes of all its participants. Payloads are not read."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import cast

from gymckpt.errors import DamagedState
from gymckpt.identity import KINDS, EpisodeId, Kind, is_safe_name
from gymckpt.ports import FileSystem, Offload
from gymckpt.report.documents import BoundaryView, EpisodeView
from gymckpt.storage.durable import exists
from gymckpt.storage.index import IndexLine
from gymckpt.storage.reader import ParticipantReader
from gymckpt.storage.records import Boundary

PARTICIPANTS = "gym"
"""The directory of a checkpoint that holds one directory a participant, `<kind>/<instance>`."""


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
    root = checkpoint / PARTICIPANTS
    if exists(fs, root) is None:
        raise DamagedState(f"{checkpoint} holds no records of participants (no {PARTICIPANTS}/ in it)")
    return [
        (kind, entry.name)
        for kind in KINDS
        if exists(fs, root / kind) is not None
        for entry in fs.scan(root / kind)
        if entry.kind == "directory" and is_safe_name(entry.name)
    ]


async def open_participant(
    fs: FileSystem, offload: Offload, checkpoint: PurePath, kind: Kind, instance: str
) -> ParticipantReader:
    """A reader of one participant's part, opened; raises `DamagedState`."""
    directory = checkpoint / PARTICIPANTS / kind / instance
    reader = ParticipantReader(fs, offload, directory, kind=kind, instance=instance)
    await reader.open()
    return reader


async def list_episodes(
    fs: FileSystem, offload: Offload, checkpoint: PurePath, restarted: Mapping[EpisodeId, str] | None
) -> list[EpisodeView]:
    """Every episode that `checkpoint` lists, by rollout and attempt; raises `DamagedState`.

    `restarted` holds the reasons of those that will start over, whether a participant holds something of them or not.
    None: nobody checked the cut (a directory that a trainer wrote), so every episode is listed as it is.
    """
    merged: dict[EpisodeId, _Merged] = {episode: _Merged() for episode in restarted or {}}
    for kind, instance in await offload.run(lambda: participants(fs, checkpoint)):
        reader = await open_participant(fs, offload, checkpoint, kind, instance)
        await offload.run(partial(_merge, merged, kind, reader))
    reasons = restarted or {}
    return [_view(episode, merged[episode], reasons.get(episode)) for episode in sorted(merged, key=_by_task)]


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
