"""Marks and the gate, which roles share with the control plane."""

import asyncio

import pytest

from gymckpt.errors import AdmissionClosed, StaleAttempt
from gymckpt.identity import EpisodeId
from gymckpt.participant.admission import Gate, Signal
from gymckpt.participant.marks import Marks
from tests.participant.stand import A, refused, soon, virtually


def test_a_mark_covers_the_attempt_and_every_earlier_one() -> None:
    marks = Marks()
    marks.raise_mark(EpisodeId("a", 2))
    assert [marks.refuses(EpisodeId("a", attempt)) for attempt in range(4)] == [True, True, True, False]
    with pytest.raises(StaleAttempt):
        marks.check(EpisodeId("a", 2))
    assert not marks.refuses(EpisodeId("b", 0))


def test_a_mark_never_sinks_and_is_one_for_each_rollout() -> None:
    marks = Marks()
    for attempt in (3, 1):
        marks.raise_mark(EpisodeId("a", attempt))
    assert marks.refuses(EpisodeId("a", 3))
    assert marks.count == 1
    marks.forget("a")
    marks.forget("a")
    assert (marks.count, marks.holds("a")) == (0, False)


def test_waiting_at_a_closed_gate_is_not_in_flight() -> None:
    async def rule() -> None:
        gate = Gate()
        gate.close()

        async def work() -> None:
            async with gate.admit("a"):
                assert set(gate.names) == {"a"}

        task = asyncio.create_task(work())
        await soon()
        assert (gate.total, gate.waiting) == (0, 1)
        gate.open()
        await task
        assert (gate.total, gate.waiting) == (0, 0)

    virtually(rule)


def test_what_wakes_to_find_the_gate_closing_again_goes_on_waiting() -> None:
    async def rule() -> None:
        gate = Gate()
        gate.close()
        task = asyncio.create_task(gate.wait_open())
        await soon()
        gate.open()
        gate.close()
        await soon()
        assert not task.done()
        gate.open()
        await task

    virtually(rule)


def test_the_marks_are_checked_after_the_wait() -> None:
    async def rule() -> None:
        gate, marks = Gate(), Marks()
        gate.close()

        async def work() -> None:
            async with gate.admit("a", lambda: marks.check(A)):
                raise AssertionError("admitted")

        task = asyncio.create_task(work())
        await soon()
        marks.raise_mark(A)
        gate.open()
        await refused("stale_attempt", task)
        assert gate.total == 0

    virtually(rule)


def test_parked_work_blocks_nothing_and_goes_on_only_when_the_gate_is_open() -> None:
    async def rule() -> None:
        gate, parked, passed = Gate(), asyncio.Event(), asyncio.Event()

        async def work() -> None:
            with gate.in_flight("a") as unit:
                async with unit.parked():
                    await parked.wait()
                passed.set()

        task = asyncio.create_task(work())
        await soon()
        gate.close()
        assert gate.total == 0
        parked.set()
        await soon()
        assert not passed.is_set()
        gate.open()
        await task
        assert gate.total == 0

    virtually(rule)


def test_cancelled_work_leaves_the_gate() -> None:
    async def rule() -> None:
        gate = Gate()

        async def work(name: str, park: bool) -> None:
            with gate.in_flight(name) as unit:
                if park:
                    async with unit.parked():
                        await asyncio.sleep(100)
                await asyncio.sleep(100)

        tasks = [asyncio.create_task(work("a", False)), asyncio.create_task(work("b", True))]
        await soon()
        assert (gate.count("a"), gate.count("b")) == (1, 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.total == 0

    virtually(rule)


def test_a_closed_gate_can_refuse_as_not_started() -> None:
    gate = Gate()
    gate.check_open("no new episode")
    gate.close()
    with pytest.raises(AdmissionClosed, match="no new episode"):
        gate.check_open("no new episode")


def test_a_signal_is_news_until_somebody_looks_and_wakes_all_who_wait() -> None:
    async def rule() -> None:
        signal = Signal()
        signal.notify()
        await signal.wait()
        signal.looked()
        waits = [asyncio.create_task(signal.wait()) for _ in range(3)]
        await soon()
        assert not any(wait.done() for wait in waits)
        signal.notify()
        signal.looked()
        await asyncio.gather(*waits)

    virtually(rule)
