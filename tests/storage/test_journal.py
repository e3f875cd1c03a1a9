"""A journal line is durable before it is answered, and every other line than the ones written is noticed."""

import asyncio
import contextlib
import errno
import os
import random
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import pytest

from gymckpt.errors import DamagedState, GymckptError, NoSpace, NotAsAsked, StorageFailed
from gymckpt.storage.journal import Journal
from gymckpt.storage.journalfiles import Position, newest_epoch
from gymckpt.storage.journallines import check_line, make_line
from gymckpt.storage.outcomes import OutcomesJournal
from tests.corruption import flips, truncations
from tests.simulation.files import MemoryFileSystem
from tests.storage.building import INLINE, RUN, memory, run

PLACE = RUN / "journal"
Make = Callable[..., Journal]


def dispatch(fs: MemoryFileSystem, epoch: int = 1, **options: Any) -> Journal:
    return Journal(fs, INLINE, PLACE, "dispatch", epoch=epoch, **options)


def outcomes(fs: MemoryFileSystem, epoch: int = 1, **options: Any) -> OutcomesJournal:
    return OutcomesJournal(fs, INLINE, PLACE, "outcomes", epoch=epoch, **options)


BOTH = pytest.mark.parametrize("make", [dispatch, outcomes])
FEW = pytest.param(60, id="few")
ALL = pytest.param(None, id="all", marks=pytest.mark.slow)


def numbers(journal: Journal) -> list[int]:
    return [event["n"] for event in journal.replay()]


async def write(make: Make, fs: MemoryFileSystem, *batches: int, epoch: int = 1, **options: Any) -> Journal:
    """Open an epoch and append events numbered on from those there are, a group commit for each of `batches`."""
    journal = make(fs, epoch, **options)
    await journal.open()
    count = len(numbers(journal))
    for size in batches:
        await asyncio.gather(*(journal.append({"n": number}) for number in range(count, count + size)))
        count += size
    return journal


async def look(make: Make, fs: MemoryFileSystem) -> Journal:
    journal = make(fs)
    await journal.inspect()
    return journal


def files(fs: MemoryFileSystem) -> list[PurePath]:
    return [PLACE / entry.name for entry in fs.scan(PLACE)]


@BOTH
def test_events_come_back_in_order_over_batches_files_and_epochs(make: Make) -> None:
    fs = memory()

    async def epochs() -> None:
        for epoch in (1, 2, 3):
            journal = await write(make, fs, 1, 5, 3, epoch=epoch, max_file_bytes=300)
            assert numbers(journal) == list(range(9 * epoch))
            await journal.close()
        assert numbers(await look(make, fs)) == list(range(27))
        assert newest_epoch(fs, PLACE) == 3

    run(epochs())


@BOTH
def test_all_who_wait_share_one_fsync(make: Make) -> None:
    fs = memory()

    async def burst() -> None:
        journal = await write(make, fs)
        before = sum(name == "fsync" for name, _ in fs.operations)
        await asyncio.gather(*(journal.append({"n": n}) for n in range(200)))
        assert sum(name == "fsync" for name, _ in fs.operations) - before <= 3

    run(burst())


@BOTH
def test_an_answered_event_survives_every_power_cut(make: Make) -> None:
    fs, rng = memory(), random.Random(4)

    async def cuts() -> None:
        journal = await write(make, fs)
        for number in range(12):
            await journal.append({"n": number})
            for chances in (None, rng, rng):
                assert numbers(await look(make, fs.crashed(chances))) == list(range(number + 1))

    run(cuts())


@BOTH
def test_a_power_cut_at_any_operation_loses_nothing_that_was_answered(make: Make) -> None:
    """And the next epoch opens, appends, and is read back."""
    whole = memory()
    run(write(make, whole, 2, 3, 1))
    steps = len(whole.operations)

    async def cut_at(step: int, seed: int) -> None:
        answered: list[int] = []

        class Cut(Exception):
            pass

        def before(operation: str, path: PurePath) -> None:
            if len(fs.operations) >= step:
                raise Cut

        fs = memory(before=before)
        journal = make(fs, 1)
        try:
            await journal.open()
            for batch in ([0, 1], [2, 3, 4], [5]):
                done = await asyncio.gather(*(journal.append({"n": n}) for n in batch), return_exceptions=True)
                if any(isinstance(result, BaseException) for result in done):
                    break
                answered += batch
        except Cut:
            pass
        fs.before = None
        after = fs.crashed(random.Random(seed) if seed else None)
        later = await write(make, after, epoch=2)
        found = numbers(later)
        assert found[: len(answered)] == answered
        assert found == list(range(len(found)))
        await later.append({"n": len(found)})
        assert numbers(await look(make, after.crashed(None))) == list(range(len(found) + 1))

    for step in range(steps + 1):
        for seed in range(4):
            run(cut_at(step, seed))


@BOTH
@pytest.mark.parametrize("samples", [FEW, ALL])
def test_a_flipped_bit_is_refused_or_changes_nothing(make: Make, samples: int | None) -> None:
    fs, rng = memory(), random.Random(5)

    async def try_all() -> None:
        for epoch in (1, 2):
            await (await write(make, fs, 2, 1, epoch=epoch)).close()
        expected = numbers(await look(make, fs))
        for path in files(fs):
            whole = fs.read(path)
            for damaged in flips(whole, rng, samples=samples):
                fs.overwrite(path, damaged)
                if "index" in path.name:
                    assert numbers(await look(make, fs)) == expected
                else:
                    await refused_or(expected, make, fs)
            fs.overwrite(path, whole)

    run(try_all())


async def refused_or(expected: list[int], make: Make, fs: MemoryFileSystem) -> None:
    """A line is checked in every bit. zstd has a few bits that nothing depends on: then all is as it was."""
    try:
        journal = await look(make, fs)
        found = numbers(journal)
        if isinstance(journal, OutcomesJournal):
            await journal.verify()
            assert [await journal.payload(outcome) for outcome in journal.outcomes()] == [None] * len(expected)
    except DamagedState as error:
        refused = str(error)
    else:
        assert make is outcomes
        assert found == expected
        return
    assert str(PLACE) in refused


def test_verify_alone_reads_the_frames_that_a_replay_leaves_to_the_index() -> None:
    fs = memory()

    async def check() -> None:
        await write(outcomes, fs, 2, 1)
        await outcomes(fs, 2).verify()
        path = PLACE / "outcomes-000001-0001.jsonl.zst"
        data = fs.read(path)
        fs.overwrite(path, data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(DamagedState, match="checksum"):
            await outcomes(fs, 2).verify()

    run(check())


@BOTH
@pytest.mark.parametrize("samples", [FEW, ALL])
def test_a_truncated_journal_is_refused_or_is_a_beginning_of_what_was_written(make: Make, samples: int | None) -> None:
    fs, rng = memory(), random.Random(6)

    async def try_all() -> None:
        written = await write(make, fs, 2, 1, 2)
        end, refusals = written.position, 0
        for path in files(fs):
            whole = fs.read(path)
            for shorter in truncations(whole, rng, samples=samples):
                fs.overwrite(path, shorter)
                try:
                    found = await look(make, fs)
                    assert numbers(found) == list(range(len(numbers(found))))
                    assert found.holds(end) == (numbers(found) == list(range(5)))
                except DamagedState:
                    refusals += 1
            fs.overwrite(path, whole)

    run(try_all())


@BOTH
def test_a_journal_shorter_than_a_published_checkpoint_says_is_refused_untouched(make: Make) -> None:
    fs = memory()

    async def shorten() -> None:
        journal = await write(make, fs, 3)
        end = Position.from_json(journal.position.to_json(), "here")
        for path in files(fs):
            fs.overwrite(path, fs.read(path)[: -5 if "index" not in path.name else None])
            if "index" in path.name:
                fs.unlink(path)
        before = fs.tree()
        with pytest.raises(DamagedState, match="a published checkpoint knows"):
            await make(fs, 2).open(end)
        assert fs.tree() == before

    run(shorten())


@BOTH
def test_a_holder_that_wakes_up_late_cannot_reach_the_next_ones_journal(make: Make) -> None:
    fs = memory()

    async def overtaken() -> None:
        first = await write(make, fs, 2)
        second = await write(make, fs, 1, epoch=2)
        with pytest.raises(NotAsAsked, match="epoch 2 of this run has begun"):
            await first.append({"n": 99})
        # Even a write that was already past that check lands where nobody reads.
        late = fs.append(PLACE / min(entry.name for entry in fs.scan(PLACE) if "index" not in entry.name))
        late.write(make_line(4, 3, b'"event":{"n":100}'))
        late.fsync()
        assert numbers(await look(make, fs)) == [0, 1, 2]
        await second.append({"n": 3})
        third = await write(make, fs, epoch=3)
        assert numbers(third) == [0, 1, 2, 3]

    run(overtaken())


@BOTH
def test_an_epoch_is_begun_once(make: Make) -> None:
    fs = memory()

    async def twice() -> None:
        await write(make, fs)
        for epoch in (1, 0):
            with pytest.raises(NotAsAsked):
                await make(fs, epoch).open()

    run(twice())


@BOTH
def test_a_full_disk_leaves_nothing_half_written_and_the_event_can_be_appended_later(make: Make) -> None:
    fs = memory()

    async def fill() -> None:
        journal = await write(make, fs, 1)
        fs.capacity_bytes = fs.used_bytes + 20
        for _ in range(2):
            with pytest.raises(NoSpace):
                await journal.append({"n": 1})
        assert numbers(await look(make, fs)) == [0]
        fs.capacity_bytes = 1 << 40
        await journal.append({"n": 1})
        assert numbers(await look(make, fs)) == [0, 1]

    run(fill())


@BOTH
@pytest.mark.parametrize("operation", ["fsync", "write"])
def test_after_a_failed_fsync_or_device_nothing_is_ever_called_durable_again(make: Make, operation: str) -> None:
    fs = memory()

    async def fail() -> None:
        journal = await write(make, fs, 1)
        failures = 0

        def before(name: str, path: PurePath) -> None:
            nonlocal failures
            if name == operation and not failures:
                failures += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

        fs.before = before
        for _ in range(3):
            with pytest.raises(StorageFailed):
                await journal.append({"n": 1})
        assert failures == 1
        assert numbers(await look(make, fs))[:1] == [0]

    run(fail())


@BOTH
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE])
def test_an_error_at_any_operation_is_named_and_harms_nothing(make: Make, code: int) -> None:
    whole = memory()
    run(write(make, whole, 1, 1))

    async def fail_at(step: int) -> None:
        fs = memory()
        journal = await write(make, fs, 1)

        def before(operation: str, path: PurePath) -> None:
            if len(fs.operations) == step:
                raise OSError(code, os.strerror(code), str(path))

        fs.before = before
        with contextlib.suppress(GymckptError):
            await journal.append({"n": 1})
        fs.before = None
        found = numbers(await look(make, fs))
        assert found in ([0], [0, 1])

    for step in range(len(whole.operations)):
        run(fail_at(step))


def test_a_payload_is_read_only_when_asked_for_and_comes_back() -> None:
    fs = memory()

    async def payloads() -> None:
        journal = await write(outcomes, fs)
        assert isinstance(journal, OutcomesJournal)
        for number in range(5):
            await journal.append({"n": number}, {"text": "x" * 5000, "number": number, "big": 2**70})
        await journal.close()
        reads: list[PurePath] = []
        fs.before = lambda operation, path: reads.append(path) if operation == "read" else None
        again = await look(outcomes, fs)
        assert isinstance(again, OutcomesJournal)
        found = list(again.outcomes())
        assert not [path for path in reads if path.name.endswith(".zst")]
        for outcome in found:
            assert await again.payload(outcome) == {"text": "x" * 5000, "number": outcome.event["n"], "big": 2**70}

    run(payloads())


def test_without_its_index_an_outcomes_journal_is_read_from_its_frames() -> None:
    fs = memory()

    async def without() -> None:
        await (await write(outcomes, fs, 3, 2)).close()
        index = next(path for path in files(fs) if "index" in path.name)
        whole = fs.read(index)
        for data in (b"", whole[: len(whole) // 2], b"rubbish\n" + whole, whole[:200] + b"x" + whole[201:]):
            fs.overwrite(index, data)
            assert numbers(await look(outcomes, fs)) == [0, 1, 2, 3, 4]
        fs.unlink(index)
        assert numbers(await look(outcomes, fs)) == [0, 1, 2, 3, 4]

    run(without())


def test_a_missing_file_is_noticed() -> None:
    fs = memory()

    async def lose() -> None:
        await (await write(dispatch, fs, 4, 4, 4, max_file_bytes=200)).close()
        await (await write(dispatch, fs, epoch=2)).close()
        for path in files(fs)[:-1]:
            data = fs.read(path)
            fs.unlink(path)
            with pytest.raises(DamagedState):
                await look(dispatch, fs)
            handle = fs.create(path)
            handle.write(data)
        assert numbers(await look(dispatch, fs)) == list(range(12))

    run(lose())


def test_a_line_is_checked_in_every_bit() -> None:
    line = make_line(7, 5, b'"event":{"a":1}')
    assert check_line(line) == (7, 5, line)
    for damaged in flips(line, random.Random(1)):
        assert check_line(damaged) is None
