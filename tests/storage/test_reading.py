"""Records are read ahead of their reader, in order, and never before what they rest on was checked."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from itertools import pairwise
from typing import TypeVar

import pytest

from gymckpt.errors import DamagedState
from gymckpt.storage.reader import ParticipantReader
from gymckpt.storage.records import StoredRecord
from tests.storage.building import memory, opaque, part, reader, run, store
from tests.storage.test_damage import LINE, Hostile, row

T = TypeVar("T")


class TimedOffload:
    """Work that is begun at once and takes two steps of the loop. Remembers when batches of records were made, and
    holds up every call after the first `free`."""

    def __init__(self, free: int = 1000) -> None:
        self._steps = 0
        self._free = free
        self.batches: list[range] = []

    async def run(self, work: Callable[[], T]) -> T:
        begun = self._steps = self._steps + 1
        self._free -= 1
        if self._free < 0:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        result = work()
        await asyncio.sleep(0)
        self._steps += 1
        if isinstance(result, list) and isinstance(result[0], StoredRecord):
            self.batches.append(range(begun, self._steps))
        return result


async def opened(offload: TimedOffload, state_bytes: int) -> ParticipantReader:
    fs = memory()
    await store(fs, 1, (opaque(f"r{number}", "x" * state_bytes) for number in range(5)))
    found = ParticipantReader(fs, offload, part(1), kind="agent", instance="a")
    await found.open()
    return found


@pytest.mark.parametrize(("state_bytes", "together"), [(300_000, True), (3 << 20, False)])
def test_small_records_are_read_ahead_and_large_ones_one_at_a_time(state_bytes: int, together: bool) -> None:
    async def read() -> None:
        offload = TimedOffload()
        records = (await opened(offload, state_bytes)).records()
        assert [stored.episode.rollout_id async for stored in records] == ["r0", "r1", "r2", "r3", "r4"]
        assert len(offload.batches) == 5
        assert any(later.start < before.stop for before, later in pairwise(offload.batches)) is together

    run(read())


@pytest.mark.parametrize("scope", [None, {"r": 0, "s": 0}])
def test_no_record_is_given_before_the_whole_index_was_checked(scope: dict[str, int] | None) -> None:
    async def read() -> None:
        hostile = Hostile()
        hostile.build([LINE], [row(), row(attempt=1)], manifest={"record_count": 3})
        found = reader(hostile.fs, 1)
        await found.open()
        async for stored in found.records(scope):
            raise AssertionError(stored)

    with pytest.raises(DamagedState, match="2 episodes, the manifest says 3"):
        run(read())


def test_a_reader_that_stops_early_leaves_nothing_running() -> None:
    async def read() -> None:
        offload = TimedOffload(free=6)  # open, digests, index, prefixes, lines, the first batch
        async with aclosing((await opened(offload, 300_000)).records()) as records:
            await anext(records)
            assert len(asyncio.all_tasks()) == 2
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    run(read())
