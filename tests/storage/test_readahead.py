"""What is read ahead: in order, within its limit, and no further once nobody uses it."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymckpt.ports import Offload, ThreadOffload
from gymckpt.storage.readahead import ReadAhead
from tests.simulation.clock import InlineOffload

LIMIT_BYTES = 100


class Tape:
    """Batches of some sizes. Remembers how many bytes were ever read and not yet used."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.read_bytes = self.used_bytes = self.most_bytes = 0
        self.full = threading.Event()

    def batches(self) -> Iterator[tuple[int, int]]:
        yield from enumerate(self.sizes)

    def read(self, number: int) -> int:
        self.read_bytes += self.sizes[number]
        self.most_bytes = max(self.most_bytes, self.read_bytes - self.used_bytes)
        if self.read_bytes - self.used_bytes >= LIMIT_BYTES:
            self.full.set()
        return number

    async def play(self, offload: Offload) -> list[int]:
        found = []
        async with aclosing(ReadAhead(self.batches(), self.read, LIMIT_BYTES).results(offload)) as results:
            async for number in results:
                found.append(number)
                self.used_bytes += self.sizes[number]
        return found


@pytest.mark.parametrize("offload", [InlineOffload(), ThreadOffload()])
@given(sizes=st.lists(st.integers(1, 2 * LIMIT_BYTES)))
def test_everything_comes_in_order_and_within_the_limit_and_one_batch(offload: Offload, sizes: list[int]) -> None:
    tape = Tape(sizes)
    assert asyncio.run(tape.play(offload)) == list(range(len(sizes)))
    assert tape.most_bytes < LIMIT_BYTES + max(sizes, default=1)


def test_of_batches_above_the_limit_one_is_in_memory_at_a_time() -> None:
    tape = Tape([LIMIT_BYTES + number for number in range(5)])
    assert asyncio.run(tape.play(ThreadOffload())) == [0, 1, 2, 3, 4]
    assert tape.most_bytes == LIMIT_BYTES + 4


def test_a_thread_reads_on_to_the_limit_while_the_first_result_is_in_use() -> None:
    async def read() -> None:
        tape = Tape([10] * 50)
        async with aclosing(ReadAhead(tape.batches(), tape.read, LIMIT_BYTES).results(ThreadOffload())) as results:
            assert await anext(results) == 0
            assert await asyncio.to_thread(tape.full.wait, 30)
            assert tape.read_bytes == LIMIT_BYTES

    asyncio.run(read())


@pytest.mark.parametrize("offload", [InlineOffload(), ThreadOffload()])
def test_what_came_before_a_failure_is_given_before_it(offload: Offload) -> None:
    def read(number: int) -> int:
        return 6 // (3 - number)

    async def play() -> None:
        results = ReadAhead(((number, 1) for number in range(9)), read, LIMIT_BYTES).results(offload)
        assert [await anext(results) for _ in range(3)] == [2, 3, 6]
        with pytest.raises(ZeroDivisionError):
            await anext(results)

    asyncio.run(play())


def test_a_reader_that_stops_early_leaves_nothing_running() -> None:
    reached, go_on = threading.Event(), threading.Event()
    read: list[int] = []

    def read_one(number: int) -> int:
        read.append(number)
        if number == 1:
            reached.set()
            assert go_on.wait(30)
        return number

    async def play(executor: ThreadPoolExecutor) -> None:
        ahead = ReadAhead(((number, 1) for number in range(9)), read_one, LIMIT_BYTES)
        async with aclosing(ahead.results(ThreadOffload(executor))) as results:
            await anext(results)
            assert await asyncio.to_thread(reached.wait, 30)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1
        go_on.set()

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(play(executor))
    assert read == [0, 1]
