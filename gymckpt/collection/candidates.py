"""Which checkpoints of a run a recovery may stand on."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gymckpt.collection import events
from gymckpt.collection.host import JournalHost
from gymckpt.collection.recovery import Candidate
from gymckpt.collection.run import Run
from gymckpt.errors import DamagedState, StorageUnavailable
from gymckpt.identity import checkpoint_sequence
from gymckpt.ports import Clock, FileSystem, Offload
from gymckpt.storage.checkpoints import CheckpointDirectory, Listed, PublishedCheckpoint, unreadable
from gymckpt.storage.problems import Problem
from gymckpt.storage.published import CHECKPOINT
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
    Raises `StorageUnavailable` where a newer one cannot be read now: nothing says that it is lost.
    """
    listed = await directory.listing()
    problems = [e.problem for e in listed if e.state == "damaged" and e.problem is not None]
    found: list[Candidate] = []
    first: PublishedCheckpoint | None = None
    unread: list[Problem] = []
    for checkpoint in _published(listed, run_id):
        wrong = [] if found else await directory.verify(checkpoint)
        unread += [problem for problem in wrong if problem.unreadable]
        problems += [problem for problem in wrong if not problem.unreadable]
        if not wrong:
            first = first or checkpoint
            found.append(candidate(checkpoint))
    for problem in (*unreadable(listed, first), *unread):
        back = f"; or move it away, to go back to {found[0].checkpoint_id}" if found else ""
        raise StorageUnavailable(problem.what, hint=f"nothing was changed: make it readable, then go on{back}")
    return found, problems


async def find_lost(directory: CheckpointDirectory, run: Run) -> dict[str, Problem]:
    """The checkpoints that were published and not removed since, as the journal says, and that are not there: what is
    known of each, by id, oldest first."""
    there = {entry.checkpoint_id: entry.state for entry in await directory.listing()}
    lost: dict[str, Problem] = {}
    for checkpoint_id in run.standing:
        path, state = directory.path(checkpoint_id), there.get(checkpoint_id)
        if state is None:
            lost[checkpoint_id] = Problem(f"{path} was published, and is not there")
        elif state == "unpublished":
            lost[checkpoint_id] = Problem(f"{path / CHECKPOINT} is missing, and {checkpoint_id} was published")
    return lost


async def with_salvaged(
    directory: CheckpointDirectory,
    host: JournalHost,
    fs: FileSystem,
    offload: Offload,
    clock: Clock,
    whole: Sequence[Candidate],
) -> tuple[tuple[Candidate, ...], list[str]]:
    """`whole`, and before it a new checkpoint made of what can be read of a damaged newer one, if any can; and what a
    person should know of it.

    Only at the user's wish: the episodes whose records are lost start over.
    """
    published, notes = _published(await directory.listing(), host.run_id), list[str]()
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
            await directory.discard(checkpoint_id)
            notes.append(f"nothing can be salvaged of {damaged.checkpoint_id}: {error.detail}")
            await host.record(events.CheckpointFailed(checkpoint_id, notes[-1]))
            continue
        collection = made.checkpoint.collection
        if not collection.continued:
            await directory.discard(checkpoint_id)
            notes.append(f"nothing can be salvaged of {damaged.checkpoint_id}: every record is lost")
            await host.record(events.CheckpointFailed(checkpoint_id, notes[-1]))
            continue
        lost = len(damaged.collection.continued) - len(collection.continued)
        notes.append(
            f"{checkpoint_id} is what could be salvaged of {damaged.checkpoint_id}: "
            f"{len(collection.continued)} episodes continue, {lost} start over"
        )
        await host.record(
            events.CheckpointPublished(
                checkpoint_id,
                episodes=len(collection.continued),
                restarts=len(collection.restarted),
                size_bytes=made.checkpoint.size_bytes,
            )
        )
        return (replace(candidate(made.checkpoint), made_of=damaged.checkpoint_id), *whole), notes
    return tuple(whole), notes


def _published(listed: Iterable[Listed], run_id: str) -> list[PublishedCheckpoint]:
    published = [e.published for e in listed if e.published is not None and e.published.collection.run_id == run_id]
    return sorted(published, key=lambda checkpoint: checkpoint.age, reverse=True)
