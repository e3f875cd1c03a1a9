"""Signals: feedback from the handler itself, and each next one more urgent."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from gymckpt.collection.signals import EXIT_AT_ONCE, Wishes, handled


def after(*numbers: signal.Signals) -> tuple[Wishes, bytes, list[int]]:
    """What is wished for, what was written, and with which codes the process would have left."""
    reading, writing = os.pipe()
    left: list[int] = []

    async def play() -> Wishes:
        wishes = Wishes()
        with handled(wishes, 25.0, leave=left.append, fd=writing):
            for number in numbers:
                os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
        return wishes

    wishes = asyncio.run(play())
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        return wishes, pipe.read(), left


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_one_stops_after_a_checkpoint_and_says_how_long_that_may_take(number: signal.Signals) -> None:
    wishes, said, left = after(number)
    assert wishes.stop.is_set()
    assert not wishes.hurry.is_set()
    assert b"at most 25 s" in said
    assert left == []


def test_the_second_one_skips_the_checkpoint_and_the_third_leaves_at_once() -> None:
    wishes, said, left = after(signal.SIGINT, signal.SIGTERM)
    assert wishes.hurry.is_set()
    assert b"only cleaning up" in said
    assert left == []
    assert after(signal.SIGINT, signal.SIGINT, signal.SIGINT)[2] == [EXIT_AT_ONCE]


def test_sigusr1_asks_for_a_checkpoint_and_stops_nothing() -> None:
    wishes, said, _ = after(signal.SIGUSR1)
    assert wishes.checkpoint.is_set()
    assert not wishes.stop.is_set()
    assert b"checkpoint" in said


def test_the_handler_writes_although_the_event_loop_is_busy() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)

    async def play() -> bytes:
        with handled(Wishes(), 5.0, fd=writing):
            os.kill(os.getpid(), signal.SIGTERM)
            return os.read(reading, 1000)  # the loop had no turn since

    assert b"stopping" in asyncio.run(play())
    os.close(reading)
    os.close(writing)


def test_a_closed_terminal_does_not_keep_a_signal_from_counting(tmp_path: Path) -> None:
    async def play() -> Wishes:
        wishes = Wishes()
        with handled(wishes, 5.0, fd=10_000):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
        return wishes

    assert asyncio.run(play()).stop.is_set()


def test_handlers_of_others_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    after(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
