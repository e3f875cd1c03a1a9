"""The task behind an episode."""

import asyncio

import pytest

from gymckpt.episodes.driver import Driver
from gymckpt.errors import ServerError, StaleAttempt
from tests.simulation.clock import run_virtual


def test_clean_up_follows_the_reply_and_is_never_cancelled() -> None:
    async def main() -> None:
        events: list[str] = []

        async def steps() -> str:
            await asyncio.sleep(1)
            return "done"

        async def clean_up() -> None:
            await asyncio.sleep(1)
            events.append("clean")

        driver = Driver("d", steps, ended=lambda: events.append("ended"), clean_up=clean_up)
        assert await asyncio.shield(driver.reply) == "done"
        driver.cancel()
        await driver.gone()
        assert events == ["ended", "clean"]

    run_virtual(main())


@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_a_cancelled_driver_says_so_and_cleans_up_even_if_it_had_not_begun(after_s: float) -> None:
    async def main() -> None:
        cleaned: list[int] = []

        async def clean_up() -> None:
            cleaned.append(1)

        driver = Driver("d", lambda: asyncio.sleep(9), clean_up=clean_up)
        if after_s:
            await asyncio.sleep(after_s)
        for _ in range(3):
            driver.cancel()
        await driver.gone()
        with pytest.raises(StaleAttempt):
            await driver.reply
        assert cleaned == [1]
        assert not driver.in_steps

    run_virtual(main())


def test_an_error_goes_to_the_caller_and_a_bug_too() -> None:
    async def main() -> None:
        async def fail() -> None:
            raise ServerError("no")

        async def bug() -> None:
            raise KeyError("x")

        with pytest.raises(ServerError):
            await Driver("d", fail).reply
        with pytest.raises(KeyError):
            await Driver("d", bug).reply

    run_virtual(main())
