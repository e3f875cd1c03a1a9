"""Commits that are refused, interrupted, stopped or tried again: all or nothing, and nothing twice."""

import asyncio
import errno
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePath
from typing import TypeVar

import pytest

from gymckpt.errors import CheckpointFailed, DamagedState, NoSpace, NotAsAsked, StaleCheckpoint, StorageFailed
from gymckpt.identity import EpisodeId
from gymckpt.storage.frames import FRAME_BYTES
from gymckpt.storage.manifest import MAX_SEGMENTS
from gymckpt.storage.records import ExportedRecord
from gymckpt.storage.writer import ParticipantWriter
from tests.simulation.files import WRITING, MemoryFileSystem
from tests.storage.building import INLINE, chain_of, load, memory, opaque, part, record, run, store, writer


def test_an_episode_exported_twice_is_refused() -> None:
    with pytest.raises(CheckpointFailed, match="r-a1 was exported twice"):
        run(store(memory(), 1, [record("r", [], attempt=1), record("r", [1], attempt=1)]))


def test_a_record_larger_than_allowed_is_refused_with_its_episode() -> None:
    with pytest.raises(CheckpointFailed, match=r"r-1: its record has .* more than the 2000 allowed"):
        run(store(memory(), 1, [record("r-0", []), record("r-1", ["x" * 3000])], max_record_bytes=2000))


def test_a_record_that_is_not_json_is_refused_with_its_episode() -> None:
    for bad in (record("r-1", [set()]), opaque("r-1", {1: "x"})):
        with pytest.raises(CheckpointFailed, match="r-1: its record is not JSON: "):
            run(store(memory(), 1, [record("r-0", []), bad]))


def test_a_list_that_is_not_there_is_refused_with_its_episode() -> None:
    exported = ExportedRecord(EpisodeId("r"), {"a": 1}, lists={"/a/b": 0})
    with pytest.raises(CheckpointFailed, match=r"r: .*'/a/b'"):
        run(store(memory(), 1, [exported]))


T = TypeVar("T")

SMALL = [record("r", [1, 2]), opaque("o", "x" * 100)]
FRAMES = [opaque(f"o-{number}", "x" * FRAME_BYTES) for number in range(4)]


@pytest.mark.parametrize("records", [SMALL, FRAMES])
def test_a_retry_after_a_full_disk_stores_the_very_same_export(records: list[ExportedRecord]) -> None:
    expected = memory()
    run(store(expected, 1, records))
    steps = len(expected.operations)
    tried = WRITING - {"fsync", "fsync_directory", "unlink"}

    async def with_failure_at(step: int) -> bool:
        failed = 0

        def fail(operation: str, path: PurePath) -> None:
            nonlocal failed
            if len(fs.operations) == step and not failed and operation in tried:
                failed += 1
                raise OSError(errno.ENOSPC, "full", str(path))

        fs = memory(before=fail)
        into = writer(fs, 1)
        told = False
        for exported in records:
            try:
                await into.add(exported)
            except NoSpace:
                told = True
        try:
            await into.finish()
        except NoSpace:
            told = True
            await into.finish()
        assert {k: v for k, v in fs.tree().items() if "/." not in k} == expected.tree(), step
        assert told <= bool(failed)
        return bool(failed)

    assert sum(run(with_failure_at(step)) for step in range(steps)) > len(records)


def test_a_failed_fsync_is_never_tried_again() -> None:
    for target in ("fsync", "fsync_directory"):
        fs = memory()
        seen = 0

        def fail(operation: str, path: PurePath, target: str = target) -> None:
            nonlocal seen
            if operation == target and "gym/agent/a" in str(path):
                seen += 1
                raise OSError(errno.EIO, "I/O error", str(path))

        async def commit(fs: MemoryFileSystem = fs, fail: object = fail) -> None:
            into = writer(fs, 1)
            await into.add(record("r", [1]))
            fs.before = fail  # type: ignore[assignment]
            for _ in range(3):
                with pytest.raises(StorageFailed):
                    await into.finish()

        run(commit())
        assert seen == 1


def test_nothing_appears_after_stop_at_whatever_point_it_comes() -> None:
    whole = memory()
    run(store(whole, 1, [record("r", [1])]))

    async def stopped_at(step: int) -> None:
        def stop(operation: str, path: PurePath) -> None:
            # From another thread: at a link the stop would wait for it, so there it comes just before.
            if len(fs.operations) == step and operation not in ("link",):
                into.stop()

        fs = memory(before=stop)
        into = writer(fs, 1)
        try:
            await into.add(record("r", [1]))
            await into.finish()
        except StaleCheckpoint:
            assert str(part(1) / "manifest.json") not in fs.tree()
            names = set(fs.tree())
            with pytest.raises(StaleCheckpoint):
                await into.finish()
            await into.discard()
            assert set(fs.tree()) <= names
            assert not any("/." in name for name in fs.tree())

    for step in range(len(whole.operations)):
        run(stopped_at(step))


def test_a_cancelled_caller_finds_the_same_work_again() -> None:
    async def commit() -> None:
        fs = memory()
        into = writer(fs, 1)
        await into.add(record("r", [1]))
        first = asyncio.ensure_future(into.finish())
        await asyncio.sleep(0)
        first.cancel()
        written = await into.finish()
        assert written is await into.finish()
        assert written.episodes == [EpisodeId("r")]

    run(commit())


class SlowOffload:
    """Work that goes on for some steps of the event loop, whether or not its caller is still there."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.ensure_future(self._work(work)))

    async def _work(self, work: Callable[[], T]) -> T:
        for _ in range(self._rng.randrange(20)):
            await asyncio.sleep(0)
        return work()


@pytest.mark.parametrize("cancelled", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_an_export_that_is_given_up_at_whatever_point_leaves_nothing_behind(seed: int, cancelled: bool) -> None:
    async def add_all(into: ParticipantWriter) -> None:
        for exported in FRAMES:
            await into.add(exported)

    async def given_up_after(steps: int) -> bool:
        fs = memory()
        into = writer(fs, 1, offload=SlowOffload(seed))
        adding = asyncio.ensure_future(add_all(into))
        for _ in range(steps):
            await asyncio.sleep(0)
        in_time = not adding.done()
        if cancelled:
            adding.cancel()
        await into.discard()
        with suppress(StaleCheckpoint, asyncio.CancelledError):
            await adding
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any("/." in name for name in fs.tree()), steps
        return in_time

    steps = 0
    while run(given_up_after(steps)):
        steps += 1
    assert steps > 10 * len(FRAMES)


def test_a_second_commit_into_the_same_directory_is_refused_unless_it_is_the_same() -> None:
    fs = memory()
    run(store(fs, 1, [record("r", [1])]))
    before = fs.tree()
    run(store(fs, 1, [record("r", [1])]))
    with pytest.raises(NotAsAsked, match=r"manifest\.json exists with other content"):
        run(store(fs, 1, [record("r", [2])]))
    assert {name: data for name, data in fs.tree().items() if name in before} == before
    assert next(iter(run(load(fs, 1)).values()))["session"]["items"] == [1]


def test_a_full_disk_is_noticed_before_anything_is_written() -> None:
    with pytest.raises(NoSpace, match="are free, about"):
        run(store(memory(capacity_bytes=1000), 1, [record("r", [])]))


def test_a_damaged_segment_met_while_merging_fails_one_commit_only() -> None:
    fs = memory()
    base, items = chain_of(fs, MAX_SEGMENTS)
    assert base is not None
    path = part(MAX_SEGMENTS) / base.segments[0].file
    data = bytearray(fs.read(path))
    data[len(data) // 2] ^= 1
    fs.overwrite(path, bytes(data))
    with pytest.raises(DamagedState, match="frame 0"):
        run(store(fs, 90, [record("r", [*items, 0])], base))
    run(store(fs, 91, [record("r", [*items, 0])], base))
    assert run(load(fs, 91))[EpisodeId("r")]["session"]["items"] == [*items, 0]


def test_the_event_loop_is_never_given_blocking_work() -> None:
    class Counting:
        def __init__(self) -> None:
            self.inside = False

        async def run(self, work):  # type: ignore[no-untyped-def]
            self.inside = True
            try:
                return work()
            finally:
                self.inside = False

    offload = Counting()

    def check(operation: str, path: PurePath) -> None:
        assert offload.inside, (operation, path)

    fs = memory(before=check)

    async def commit() -> None:
        from gymckpt.storage.reader import ParticipantReader
        from gymckpt.storage.writer import ParticipantWriter

        into = ParticipantWriter(fs, offload, part(1), checkpoint_id="c", kind="agent", instance="a")
        await into.add(record("r", [1]))
        await into.finish()
        opened = ParticipantReader(fs, offload, part(1), kind="agent", instance="a")
        await opened.open()
        assert [stored.episode async for stored in opened.records(None)] == [EpisodeId("r")]
        assert await opened.record(EpisodeId("r")) is not None
        await into.discard()

    assert INLINE
    run(commit())
