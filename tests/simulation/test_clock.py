"""The virtual clock itself."""

import asyncio
import time

import pytest

from tests.simulation.clock import InlineOffload, VirtualClock, run_virtual


def test_an_hour_of_waiting_takes_no_time_and_is_seen_by_the_clock() -> None:
    async def main() -> float:
        clock = VirtualClock()
        await clock.sleep_until(clock.monotonic() + 3600)
        return clock.monotonic()

    started = time.monotonic()
    assert run_virtual(main()) == pytest.approx(3600)
    assert time.monotonic() - started < 5


def test_timeouts_fire_in_order_of_virtual_time() -> None:
    async def late(seconds: float, seen: list[float]) -> None:
        await asyncio.sleep(seconds)
        seen.append(seconds)

    async def main() -> list[float]:
        seen: list[float] = []
        async with asyncio.TaskGroup() as group:
            for seconds in (30.0, 10.0, 20.0):
                group.create_task(late(seconds, seen))
        return seen

    assert run_virtual(main()) == [10.0, 20.0, 30.0]


def test_a_deadlock_is_an_error_and_not_a_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtual(main())


def test_offloaded_work_runs_inline() -> None:
    async def main() -> int:
        return await InlineOffload().run(lambda: 7)

    assert run_virtual(main()) == 7
