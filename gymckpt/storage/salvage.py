"""Makes a smaller checkpoint that is whole out of a damaged one. Only ever on request."""

from dataclasses import dataclass, replace
from functools import partial

import msgspec

from gymckpt.errors import DamagedState
from gymckpt.identity import EpisodeId, Kind
from gymckpt.ports import FileSystem, Offload
from gymckpt.storage.checkpoints import CheckpointDirectory
from gymckpt.storage.participantfiles import ParticipantFiles
from gymckpt.storage.problems import Problem
from gymckpt.storage.published import COLLECTION, PublishedCheckpoint, Restarted
from gymckpt.storage.records import ExportedRecord
from gymckpt.storage.scope import Holdings
from gymckpt.storage.writer import ParticipantWriter

REASON = "damaged"
"""Why a salvaged checkpoint restarts an episode."""


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What could be saved."""

    checkpoint: PublishedCheckpoint
    lost: list[Problem]


async def salvage(
    fs: FileSystem,
    offload: Offload,
    directory: CheckpointDirectory,
    damaged: PublishedCheckpoint,
    checkpoint_id: str,
    *,
    sequence: int,
    epoch: int,
    created_at: float,
) -> Salvaged:
    """Publish `checkpoint_id` with the episodes of `damaged` that every participant which has them can still read.

    The others become restarted: those whose records are in a file that is damaged, cut or missing, and those that a
    participant lacks. `DamagedState` if a manifest or an index is lost: then nobody knows what was there.
    """
    sources: list[tuple[Kind, str, ParticipantFiles]] = []
    lost: list[Problem] = []
    holdings = Holdings(damaged.collection.continued)
    for kind, instance in damaged.participants:
        files = ParticipantFiles(fs, damaged.directory(kind, instance), kind=kind, instance=instance)
        await offload.run(partial(files.open, whole=False))
        lost += await offload.run(partial(_unreadable, files))
        await offload.run(partial(holdings.add, (kind, instance), files))
        sources.append((kind, instance, files))
    lost += await offload.run(lambda: holdings.lacking(damaged.path / COLLECTION))
    unreadable = {episode for problem in lost for episode in problem.episodes}
    path = await directory.begin(checkpoint_id)
    for kind, instance, files in sources:
        part = path / "gym" / kind / instance
        writer = ParticipantWriter(fs, offload, part, checkpoint_id=checkpoint_id, kind=kind, instance=instance)
        lost += await _copy(offload, files, writer, unreadable)
    collection = replace(
        damaged.collection,
        checkpoint_id=checkpoint_id,
        sequence=sequence,
        epoch=epoch,
        created_at=created_at,
        continued=[episode for episode in damaged.collection.continued if episode not in unreadable],
        restarted=[
            *damaged.collection.restarted,
            *(Restarted(episode, REASON) for episode in damaged.collection.continued if episode in unreadable),
        ],
    )
    published = await directory.publish(checkpoint_id, collection, expected=damaged.participants)
    return Salvaged(published, lost)


def _unreadable(files: ParticipantFiles) -> list[Problem]:
    source = files.source()
    problems: list[Problem] = []
    for line in files.index():
        try:
            files.read(source, line)
        except DamagedState as error:
            problems.append(Problem.of(error, line.episode))
    return problems


async def _copy(
    offload: Offload, files: ParticipantFiles, writer: ParticipantWriter, without: set[EpisodeId]
) -> list[Problem]:
    """Prefixes that cannot be read cost no episode: their calls are generated whole."""
    lost: list[Problem] = []
    source = files.source()
    prefixes = None
    try:
        prefixes = await offload.run(files.prefixes)
    except DamagedState as error:
        lost.append(Problem.of(error))
    for line in files.index():
        if line.episode in without:
            continue
        stored = await offload.run(partial(files.read, source, line))
        prefix = None if prefixes is None else await offload.run(partial(prefixes.read, line.episode))
        kept = ExportedRecord(stored.episode, stored.record, stored.boundary, stored.turns, stored.needs)
        await writer.add(msgspec.structs.replace(kept, prefix=prefix))
    await writer.finish()
    return lost
