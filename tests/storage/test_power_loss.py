"""Whatever a power cut or an error leaves, the newest checkpoint reported published is there, or a later one."""

import asyncio
import contextlib
import errno
import os
import random
from pathlib import PurePath

import pytest

from gymckpt.errors import GymckptError
from gymckpt.identity import EpisodeId
from gymckpt.storage.base import Base
from gymckpt.storage.records import ExportedRecord
from tests.simulation.files import MemoryFileSystem
from tests.storage.building import RUN_ID, directory, load, memory, opaque, publish, record, run

ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE]


def state(sequence: int) -> list[ExportedRecord]:
    """What is checkpointed as number `sequence`."""
    return [record("r", list(range(sequence))), opaque("o", {"n": sequence}), opaque("same", "x" * 100)]


async def workload(fs: MemoryFileSystem, reported: list[int]) -> None:
    """Three checkpoints, the first removed on the way; what was reported published is noted."""
    base: Base | None = None
    for sequence in (1, 2, 3):
        _, written = await publish(fs, sequence, state(sequence), base)
        base = written.base
        reported.append(sequence)
        await directory(fs).prune(1)


async def check(fs: MemoryFileSystem, reported: list[int]) -> None:
    """What was reported last, or a later one, is found and read; the next checkpoint can be made."""
    found, _ = await directory(fs).newest_valid(RUN_ID)
    sequence = found.collection.sequence if found else 0
    assert sequence >= max(reported, default=0)
    if found is not None:
        assert list((await load(fs, sequence)).values()) == [r.record for r in state(sequence)]
        assert not await directory(fs).verify(found)
    _, written = await publish(fs, 9, state(9))
    assert len(written.episodes) == 3
    await directory(fs).prune(1)
    assert [entry.published.collection.sequence for entry in await directory(fs).listing() if entry.published] == [9]


def steps() -> int:
    fs = memory()
    run(workload(fs, []))
    return len(fs.operations)


FEW = pytest.param(1, 4, id="few")
ALL = pytest.param(40, 1, id="all", marks=pytest.mark.slow)


@pytest.mark.parametrize(("seeds", "stride"), [FEW, ALL])
def test_a_power_cut_at_any_operation_loses_nothing_that_was_reported(seeds: int, stride: int) -> None:
    class Cut(BaseException):
        pass

    async def cut_at(step: int) -> None:
        def before(operation: str, path: PurePath) -> None:
            if len(fs.operations) >= step:
                raise Cut

        fs, reported = memory(before=before), list[int]()
        task = asyncio.ensure_future(workload(fs, reported))
        await asyncio.wait([task])
        assert isinstance(task.exception(), (Cut, type(None)))
        fs.before = None
        await check(fs.crashed(None), reported)
        for seed in range(seeds):
            await check(fs.crashed(random.Random(1000 * step + seed)), reported)
        await check(fs.restarted(), reported)

    for step in range(0, steps() + stride, stride):
        run(cut_at(step))


@pytest.mark.parametrize("stride", [pytest.param(7, id="few"), pytest.param(1, id="all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("code", ERRORS)
def test_an_error_at_any_operation_fails_one_checkpoint_by_name_and_leaves_the_last(code: int, stride: int) -> None:
    async def fail_at(step: int) -> None:
        def before(operation: str, path: PurePath) -> None:
            if len(fs.operations) == step:
                raise OSError(code, os.strerror(code), str(path))

        fs, reported = memory(before=before), list[int]()
        with contextlib.suppress(GymckptError):
            await workload(fs, reported)
        fs.before = None
        await check(fs.crashed(None), reported)
        await check(fs.restarted(), reported)

    for step in range(ERRORS.index(code) % stride, steps() + 1, stride):
        run(fail_at(step))


def test_checkpoints_made_on_a_disk_of_any_size_fail_by_name_or_are_whole() -> None:
    async def on(capacity_bytes: int) -> bool:
        fs, reported = memory(), list[int]()
        try:
            _, written = await publish(fs, 1, state(1))
            fs.capacity_bytes = fs.used_bytes + capacity_bytes
            fs.free_bytes = lambda path: 1 << 40  # type: ignore[method-assign]
            reported.append(1)
            await publish(fs, 2, state(2), written.base)
            reported.append(2)
        except GymckptError:
            pass
        fs.capacity_bytes = 1 << 40
        await check(fs, reported)
        return reported == [1, 2]

    fits = [run(on(capacity)) for capacity in range(0, 4000, 97)]
    assert not fits[0]
    assert fits[-1]
    assert EpisodeId("r")
