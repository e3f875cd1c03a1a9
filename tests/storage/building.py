"""Small builders for tests of storage: commits and reads over a file system in memory, run inline."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import PurePath
from typing import Any, TypeVar

from gymckpt.identity import EpisodeId
from gymckpt.ports import FileSystem, Offload
from gymckpt.storage.base import Base
from gymckpt.storage.checkpoints import CheckpointDirectory, Collection, PublishedCheckpoint
from gymckpt.storage.reader import ParticipantReader
from gymckpt.storage.records import Boundary, ExportedRecord, Record
from gymckpt.storage.writer import ParticipantWriter, Written
from tests.simulation.clock import InlineOffload
from tests.simulation.files import MemoryFileSystem

T = TypeVar("T")

RUN = PurePath("/run")
ROOT = RUN / "checkpoints"
RUN_ID = "0123456789abcdef0123456789abcdef"


INLINE = InlineOffload()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def memory(**options: Any) -> MemoryFileSystem:
    """A file system in memory in which the run's directory exists."""
    fs = MemoryFileSystem(**options)
    fs.make_root(RUN)
    return fs


def checkpoint_id(sequence: int) -> str:
    return f"ckpt-{sequence:06d}-{sequence:08x}"


def part(sequence: int, kind: str = "agent", instance: str = "a") -> PurePath:
    return ROOT / checkpoint_id(sequence) / "gym" / kind / instance


def record(rollout: str, items: list[Any], attempt: int = 0, **more: Any) -> ExportedRecord:
    """An agent-like record with one append-only list."""
    content: Record = {
        "episode_id": {"rollout_id": rollout, "attempt": attempt},
        "session": {"usage": None, "items": items, "last": len(items)},
        **more,
    }
    boundary = Boundary("invoke_agent", len(items), 1.5)
    lists = {"/session/items": len(items)}
    return ExportedRecord(EpisodeId(rollout, attempt), content, boundary, len(items), (("agent", "a"),), None, lists)


def opaque(rollout: str, state: Any, attempt: int = 0, revision: int | None = None) -> ExportedRecord:
    """A record with an opaque state, at a boundary that needs nobody else."""
    content = {"episode_id": {"rollout_id": rollout, "attempt": attempt}, "session_id": f"s-{rollout}", "state": state}
    boundary = Boundary("invoke_agent", 1, 1.5)
    return ExportedRecord(EpisodeId(rollout, attempt), content, boundary, 0, (), revision)


def writer(
    fs: FileSystem, sequence: int, base: Base | None = None, offload: Offload = INLINE, **options: Any
) -> ParticipantWriter:
    return ParticipantWriter(
        fs,
        offload,
        part(sequence),
        checkpoint_id=checkpoint_id(sequence),
        kind="agent",
        instance="a",
        base=base,
        **options,
    )


async def store(
    fs: FileSystem, sequence: int, records: Iterable[ExportedRecord], base: Base | None = None, **options: Any
) -> Written:
    written = writer(fs, sequence, base, **options)
    for exported in records:
        await written.add(exported)
    return await written.finish()


def reader(fs: FileSystem, sequence: int, **options: Any) -> ParticipantReader:
    return ParticipantReader(fs, INLINE, part(sequence), kind="agent", instance="a", **options)


async def load(fs: FileSystem, sequence: int, scope: Mapping[str, int] | None = None) -> dict[EpisodeId, Record]:
    opened = reader(fs, sequence)
    await opened.open()
    return {stored.episode: stored.record async for stored in opened.records(scope)}


def directory(fs: FileSystem) -> CheckpointDirectory:
    return CheckpointDirectory(fs, INLINE, ROOT)


def collection(sequence: int, continued: Iterable[EpisodeId] = (), **options: Any) -> Collection:
    return Collection(checkpoint_id(sequence), RUN_ID, sequence, 1, 12.5, list(continued), **options)


async def publish(
    fs: FileSystem, sequence: int, records: Iterable[ExportedRecord], base: Base | None = None, **options: Any
) -> tuple[PublishedCheckpoint, Written]:
    """A whole checkpoint of one agent."""
    checkpoints = directory(fs)
    await checkpoints.begin(checkpoint_id(sequence))
    written = await store(fs, sequence, records, base)
    record_of_it = collection(sequence, written.episodes, **options)
    return await checkpoints.publish(checkpoint_id(sequence), record_of_it), written


def chain_of(fs: MemoryFileSystem, count: int) -> tuple[Base | None, list[int]]:
    """Commits 1 to `count` of one conversation, an item each."""
    base, items = None, []
    for sequence in range(1, count + 1):
        items.append(sequence)
        base = run(store(fs, sequence, [record("r", items)], base)).base
    return base, items
