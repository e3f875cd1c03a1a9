"""Removes checkpoints of a run that nobody is carrying out, by the user's word; on a full disk too."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeAlias

from gymckpt.collection import events
from gymckpt.collection.candidates import find_lost
from gymckpt.collection.journals import Journals
from gymckpt.collection.lock import RunLock
from gymckpt.collection.opening import known_positions
from gymckpt.collection.reading import look
from gymckpt.collection.rundirectory import RunPaths, RunRecord, read_run
from gymckpt.errors import DamagedState, GymckptError, NoSpace, UsageError
from gymckpt.identity import checkpoint_sequence
from gymckpt.ports import Clock, FileSystem, Offload
from gymckpt.storage.checkpoints import CheckpointDirectory
from gymckpt.storage.problems import Problem

_Intend: TypeAlias = Callable[[list[str]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was done."""

    removed: list[str]
    gone: list[str]
    """These were gone already, and are missed no more."""
    unrecorded: str | None = None
    """Why the journal does not say so, if it does not: `verify` goes on to miss them."""


async def prune(
    fs: FileSystem, offload: Offload, clock: Clock, root: PurePath, *, keep: int, chosen: Sequence[str] = ()
) -> Pruned:
    """Remove what is older than the newest `keep` whole checkpoints, named ones excepted; or exactly `chosen`. What of
    these is gone already is missed no more.

    The journal says so first; where it has no space, or cannot be read, afterwards if it can. Raises `UsageError` for a
    chosen id that the run does not have, `NotAsAsked` while a collector holds the run.
    """
    paths = RunPaths(root)
    record = await offload.run(lambda: read_run(fs, paths))
    pruner = _Pruner(fs, offload, clock, paths, record)
    try:
        async with pruner.holding() as tell:
            return await pruner.remove(keep, chosen, tell)
    except (NoSpace, DamagedState):
        told: list[str] = []
    async with pruner.holding(recorded=False):
        pruned = await pruner.remove(keep, chosen, _noting(told))
    try:
        async with pruner.holding() as tell:
            await tell(told)
    except GymckptError as error:
        return Pruned(pruned.removed, [], error.detail)
    return pruned


def _noting(told: list[str]) -> _Intend:
    async def note(checkpoint_ids: list[str]) -> None:
        told.extend(checkpoint_ids)

    return note


class _Pruner:
    def __init__(self, fs: FileSystem, offload: Offload, clock: Clock, paths: RunPaths, record: RunRecord) -> None:
        self._fs = fs
        self._offload = offload
        self._clock = clock
        self._paths = paths
        self._record = record
        self._directory = CheckpointDirectory(fs, offload, paths.checkpoints)

    @asynccontextmanager
    async def holding(self, *, recorded: bool = True) -> AsyncIterator[_Intend]:
        """Hold the run; what is given tells the journal of removals. It is opened at the first."""
        lock = RunLock(self._fs, self._offload, self._clock, self._paths)
        await lock.take(recorded=recorded)
        journals = Journals(self._fs, self._offload, self._clock, self._paths.journal, epoch=lock.epoch)
        opened = False

        async def tell(checkpoint_ids: list[str]) -> None:
            nonlocal opened
            if not opened:
                await journals.open(await known_positions(self._fs, self._offload, self._paths, self._record.run_id))
                opened = True
                await journals.append(events.EpochBegun(lock.epoch, str(lock.holder)), patient=False)
            await journals.append(events.CheckpointsRemoved(tuple(checkpoint_ids)), patient=False)

        try:
            yield tell
        finally:
            await journals.close()
            await lock.release()

    async def remove(self, keep: int, chosen: Sequence[str], intend: _Intend) -> Pruned:
        """Remove, and tell `intend` before."""
        lost, named = await self._lost()
        listing = await self._directory.listing()
        listed = {entry.checkpoint_id for entry in listing}
        newest = max((e.published.collection.sequence for e in listing if e.published is not None), default=0)
        if missing := [name for name in chosen if name not in listed and name not in lost]:
            raise UsageError(
                f"{self._paths.root} has no checkpoint {missing[0][:160]!r}",
                hint=f"see: gymckpt inspect {self._paths.root}",
            )
        there = [name for name in chosen if name in listed]
        past = {name for name in lost if name not in named and checkpoint_sequence(name) < newest}
        gone = [name for name in lost if name in (chosen or past)]
        if there or gone:
            await intend([*there, *(name for name in gone if name not in there)])
        for name in there:
            await self._directory.discard(name)
        if not chosen:
            there = await self._directory.prune(keep, self._record.run_id, intend=intend)
        return Pruned(there, [name for name in gone if name not in there])

    async def _lost(self) -> tuple[Mapping[str, Problem], Mapping[str, str]]:
        """What the journal misses, and the names that it knows; nothing where it cannot be read."""
        try:
            run = (await look(self._fs, self._offload, self._clock, self._paths)).run
        except DamagedState:
            return {}, {}
        return await find_lost(self._directory, run), run.named
