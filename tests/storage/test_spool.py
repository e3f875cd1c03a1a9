"""Frames that several threads compress stand in the file in the order in which they were put."""

import errno
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import PurePath

import pytest
import zstandard

from gymckpt.errors import NoSpace, StorageFailed
from gymckpt.storage.manifest import Segment
from gymckpt.storage.segments import FrameSource, Spool
from tests.simulation.files import MemoryFileSystem
from tests.storage.building import RUN, memory

LINES = [[b"first, ", b"one\n", b"two\n"], [b"second\n"], [b"third\n"]]


def lines_in(fs: MemoryFileSystem, spool: Spool, segment: Segment) -> list[bytes]:
    data = fs.read(spool.path)
    return [
        zstandard.ZstdDecompressor().decompress(data[frame.offset : frame.offset + frame.size_bytes])
        for frame in segment.frames
    ]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_whatever_frame_is_compressed_first_they_are_written_in_order(order: tuple[int, ...]) -> None:
    fs = memory()
    spool = Spool(fs, RUN, 1)
    frames = [spool.put(lines) for lines in LINES]
    for number in order:
        spool.store(frames[number])
    assert lines_in(fs, spool, spool.finish()) == [b"".join(lines) for lines in LINES]


def test_frames_that_nobody_stored_are_stored_by_finish() -> None:
    fs = memory()
    spool = Spool(fs, RUN, 1)
    frames = [spool.put(lines) for lines in LINES]
    spool.store(frames[2])
    assert spool.size_bytes == 0
    assert lines_in(fs, spool, spool.finish()) == [b"".join(lines) for lines in LINES]


@pytest.mark.parametrize("then", ["truncate", "append"])
def test_a_write_is_made_again_although_mending_the_file_failed_too(then: str) -> None:
    failures = ["write", then]

    def fail(operation: str, path: PurePath) -> None:
        if failures and operation == failures[0]:
            failures.pop(0)
            raise OSError(errno.ENOSPC, "full", str(path))

    fs = memory(before=fail)
    spool = Spool(fs, RUN, 1)
    for lines in LINES:
        spool.put(lines)
    for _ in range(2):
        with pytest.raises(NoSpace):
            spool.flush()
    assert not failures
    assert lines_in(fs, spool, spool.finish()) == [b"".join(lines) for lines in LINES]


def test_nothing_is_written_any_more_after_a_write_that_met_a_broken_disk() -> None:
    failures = [True]

    def fail(operation: str, path: PurePath) -> None:
        if operation == "write" and failures:
            failures.pop()
            raise OSError(errno.EIO, "I/O error", str(path))

    fs = memory(before=fail)
    spool = Spool(fs, RUN, 1)
    first, second = spool.put(LINES[0]), spool.put(LINES[1])
    for work in (lambda: spool.store(first), lambda: spool.store(second), spool.flush, spool.finish):
        with pytest.raises(StorageFailed):
            work()
    assert fs.read(spool.path) == b""


def test_frames_that_are_wanted_again_and_again_are_kept() -> None:
    reads = 0

    def count(operation: str, path: PurePath) -> None:
        nonlocal reads
        reads += operation == "read"

    fs = memory(before=count)
    spool = Spool(fs, RUN, 1)
    for number in range(40):
        spool.put([b"%d\n" % number])
    segment = spool.finish()
    fs.link(spool.path, RUN / segment.file)
    source = FrameSource(fs, RUN, (segment,), 100)
    for _ in range(50):
        for number in range(40):
            assert source.frame(0, number) == b"%d\n" % number
    assert reads < 4 * 40


def test_a_write_that_failed_is_made_by_whoever_stores_the_next_frame() -> None:
    failures = [True]

    def fail(operation: str, path: PurePath) -> None:
        if operation == "write" and failures:
            failures.pop()
            raise OSError(errno.ENOSPC, "full", str(path))

    fs = memory(before=fail)
    spool = Spool(fs, RUN, 1)
    first, second = spool.put(LINES[0]), spool.put(LINES[1])
    with pytest.raises(NoSpace):
        spool.store(first)
    spool.store(second)
    assert lines_in(fs, spool, spool.finish()) == [b"".join(lines) for lines in LINES[:2]]


def test_threads_store_frames_of_every_size_at_once() -> None:
    fs, rng = memory(), random.Random(5)
    spool = Spool(fs, RUN, 1)
    contents = [rng.randbytes(rng.choice([10, 10_000, 300_000])).hex().encode() + b"\n" for _ in range(40)]
    with ThreadPoolExecutor(4) as threads:
        for storing in [threads.submit(spool.store, spool.put([content])) for content in contents]:
            storing.result()
    assert lines_in(fs, spool, spool.finish()) == contents
