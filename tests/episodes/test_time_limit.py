"""The stopwatch of an episode."""

import asyncio

import pytest

from gymckpt.episodes.time_limit import TimeLimit, TimeLimitReached
from tests.simulation.clock import VirtualClock, run_virtual


def test_it_ends_the_work_when_the_time_is_used_up_and_waits_for_its_end() -> None:
    async def main() -> None:
        clock = VirtualClock()
        limit = TimeLimit(clock, 10.0, used_s=4.0)
        ended = []

        async def work() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(2)
                ended.append(clock.monotonic())

        limit.start()
        with pytest.raises(TimeLimitReached, match="step verify"):
            await limit.run("verify", work)
        assert ended == [8.0]

    run_virtual(main())


def test_standing_still_puts_the_end_off() -> None:
    async def main() -> None:
        clock = VirtualClock()
        limit = TimeLimit(clock, 10.0)
        limit.start()
        running = asyncio.create_task(limit.run("s", lambda: asyncio.sleep(1000)))
        for _ in range(3):
            await asyncio.sleep(2)
            limit.stop()
            await asyncio.sleep(50)
            limit.start()
        with pytest.raises(TimeLimitReached):
            await running
        assert clock.monotonic() == pytest.approx(160)
        assert limit.used_s == pytest.approx(10)

    run_virtual(main())


def test_work_that_ends_in_time_gives_its_result_and_its_errors() -> None:
    async def main() -> None:
        limit = TimeLimit(VirtualClock(), 10.0)
        limit.start()

        async def seven() -> int:
            await asyncio.sleep(9)
            return 7

        async def wrong() -> None:
            raise KeyError("x")

        assert await limit.run("s", seven) == 7
        with pytest.raises(KeyError):
            await limit.run("s", wrong)

    run_virtual(main())


def test_a_cancellation_reaches_the_work_once() -> None:
    async def main() -> None:
        limit = TimeLimit(VirtualClock(), 10.0)
        limit.start()
        cancelled = []

        async def work() -> None:
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                cancelled.append(1)
                await asyncio.sleep(1)
                raise

        running = asyncio.create_task(limit.run("s", work))
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
        assert cancelled == [1]

    run_virtual(main())


def test_without_a_limit_it_only_measures() -> None:
    async def main() -> None:
        limit = TimeLimit(VirtualClock(), None)
        limit.start()
        await limit.run("s", lambda: asyncio.sleep(1e6))
        assert limit.used_s == pytest.approx(1e6)

    run_virtual(main())
