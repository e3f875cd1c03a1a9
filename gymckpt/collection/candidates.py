"""Which checkpoints of a run a recovery may stand on."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from gymckpt.collection import events
from gymckpt.collection.host import JournalHost
from gymckpt.collection.recovery import Candidate
from gymckpt.errors import DamagedState
from gymckpt.identity import checkpoint_sequence
from gymckpt.ports import Clock, FileSystem, Offload
from gymckpt.storage.checkpoints import CheckpointDirectory, PublishedCheckpoint
from gymckpt.storage.problems import Problem
from gymckpt.storage.salvage import salvage


def candidate(published: PublishedCheckpoint) -> Candidate:
    """A published checkpoint as the planner sees it."""
    return Candidate(
        checkpoint_id=published.checkpoint_id,
        directory=published.path,
        continued=tuple(published.collection.continued),
        participants=frozenset(published.participants),
    )


async def find_candidates(directory: CheckpointDirectory, run_id: str) -> tuple[list[Candidate], list[Problem]]:
    """The run's published checkpoints that can be stood on, newest first, and what is wrong with newer ones.

    The first one is checked to its last byte; older ones only stand by, and participants check what they restore.
    """
    published, problems = await _published(directory, run_id)
    found: list[Candidate] = []
    for checkpoint in published:
        wrong = [] if found else await directory.verify(checkpoint)
        problems += wrong
        if not wrong:
            found.append(candidate(checkpoint))
    return found, problems


async def with_salvaged(
    directory: CheckpointDirectory,
    host: JournalHost,
    fs: FileSystem,
    offload: Offload,
    clock: Clock,
    whole: Sequence[Candidate],
) -> tuple[Candidate, ...]:
    """`whole`, and before it a new checkpoint made of what can be read of a damaged newer one, if any can.

    Only at the user's wish: the episodes whose records are lost start over.
    """
    published, _ = await _published(directory, host.run_id)
    known = {standing.checkpoint_id for standing in whole[:1]}
    for damaged in itertools.takewhile(lambda checkpoint: checkpoint.checkpoint_id not in known, published):
        checkpoint_id = await host.begin_checkpoint()
        try:
            made = await salvage(
                fs,
                offload,
                directory,
                damaged,
                checkpoint_id,
                sequence=checkpoint_sequence(checkpoint_id),
                epoch=host.epoch,
                created_at=clock.time(),
            )
        except DamagedState as error:
            await host.record(events.CheckpointFailed(checkpoint_id, f"nothing to salvage: {error.detail}"))
            continue
        collection = made.checkpoint.collection
        if not collection.continued:
            await directory.discard(checkpoint_id)
            await host.record(events.CheckpointFailed(checkpoint_id, "nothing to salvage: every record is lost"))
            continue
        await host.record(
            events.CheckpointPublished(
                checkpoint_id,
                episodes=len(collection.continued),
                restarts=len(collection.restarted),
                size_bytes=made.checkpoint.size_bytes,
            )
        )
        return (replace(candidate(made.checkpoint), made_of=damaged.checkpoint_id), *whole)
    return tuple(whole)


async def _published(directory: CheckpointDirectory, run_id: str) -> tuple[list[PublishedCheckpoint], list[Problem]]:
    listed = await directory.listing()
    problems = [entry.problem for entry in listed if entry.problem is not None]
    published = [e.published for e in listed if e.published is not None and e.published.collection.run_id == run_id]
    return sorted(published, key=lambda checkpoint: checkpoint.age, reverse=True), problems
