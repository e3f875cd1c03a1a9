"""Where an episode counts while a checkpoint is open: rules one by one, and then any history."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymckpt.episodes.boundary import Snapshot
from gymckpt.episodes.steps import Track
from gymckpt.episodes.time_limit import TimeLimit
from gymckpt.errors import ServerError
from gymckpt.identity import EpisodeId
from tests.episodes.floors import Scripted, Step, new_floor
from tests.simulation.clock import VirtualClock, run_virtual


def test_a_wait_step_blocks_until_its_boundary_and_a_replay_step_never_does() -> None:
    async def main() -> None:
        floor, clock = new_floor(), VirtualClock()
        slow = Scripted("wait", [Step("wait", 10), Step("replay", 1)], floor, clock)
        free = Scripted("replay", [Step("replay", 10), Step("wait", 1)], floor, clock)
        tasks = [asyncio.create_task(one.run()) for one in (slow, free)]
        await asyncio.sleep(5)
        floor.close()
        assert floor.blockers() == ["wait"]
        await asyncio.sleep(100)
        assert floor.blockers() == []
        assert (slow.exported, free.exported) == ([0], None)
        assert free.taken == [0], "the replay step has ended, and is parked at its next boundary"
        floor.open()
        await asyncio.gather(*tasks)
        assert floor.counts() == {"parked": 0, "replay": 0, "wait": 0}

    run_virtual(main())


def test_the_boundary_after_a_replay_step_counts_from_the_next_checkpoint_on() -> None:
    async def main() -> None:
        floor, clock = new_floor(), VirtualClock()
        one = Scripted("r", [Step("replay", 10), Step("replay", 10)], floor, clock)
        task = asyncio.create_task(one.run())
        await asyncio.sleep(5)
        floor.close()
        await asyncio.sleep(20)
        seen = [one.exported]
        floor.open()
        floor.close()
        seen.append(one.exported)
        await asyncio.sleep(20)
        seen.append(one.exported)
        assert seen == [None, [0], [0]], "it never left that boundary in between"
        floor.open()
        await task

    run_virtual(main())


def test_a_replay_step_that_fails_while_closed_fails_after_the_opening() -> None:
    async def main() -> None:
        floor, clock = new_floor(), VirtualClock()
        track = Track(floor, clock, EpisodeId("r"), TimeLimit(clock, None))

        async def fail() -> None:
            await asyncio.sleep(1)
            raise ServerError("no")

        failing = asyncio.create_task(track.step("s", "replay", fail))
        await asyncio.sleep(0)
        floor.close()
        await asyncio.sleep(5)
        assert not failing.done()
        floor.open()
        with pytest.raises(ServerError):
            await failing
        assert (track.place, track.exported) == ("parked", None)

    run_virtual(main())


def test_becoming_a_restart_waits_until_no_checkpoint_is_open() -> None:
    async def main() -> None:
        floor, clock = new_floor(), VirtualClock()
        early, late = (Track(floor, clock, EpisodeId(name), TimeLimit(clock, None)) for name in ("early", "late"))
        floor.becomes_restart(early)
        floor.close()
        floor.becomes_restart(late)
        early.end()
        assert floor.restarts() == ["early"], "frozen, even when one of them ends"
        floor.open()
        assert floor.restarts() == ["late"]

    run_virtual(main())


def test_a_restart_is_never_waited_for() -> None:
    async def main() -> None:
        floor, clock = new_floor(), VirtualClock()
        one = Scripted("r", [Step("wait", 10)], floor, clock)
        floor.becomes_restart(one.track)
        task = asyncio.create_task(one.run())
        await asyncio.sleep(1)
        floor.close()
        assert floor.blockers() == []
        floor.open()
        await task

    run_virtual(main())


def test_a_restored_episode_sits_at_its_boundary_until_a_new_one() -> None:
    async def main() -> None:
        floor, clock = new_floor(), VirtualClock()
        first = Track(floor, clock, EpisodeId("r"), TimeLimit(clock, None))
        first.record("next", lambda: Snapshot({"a": 1}))
        point = first.exported
        again = Track(floor, clock, EpisodeId("r", 1), TimeLimit(clock, None), point=point)
        step = asyncio.create_task(again.step("next", "replay", lambda: asyncio.sleep(5)))
        await asyncio.sleep(1)
        assert again.exported is point
        await step
        again.record("after", lambda: Snapshot({"a": 2}))
        assert again.exported is not None
        assert again.exported.boundary.number == 2, "numbers go on"

    run_virtual(main())


STEP = st.builds(Step, st.sampled_from(["wait", "replay"]), st.integers(0, 9).map(float), st.booleans())
HISTORY = st.tuples(
    st.lists(st.lists(STEP, max_size=6), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8),
)


@settings(max_examples=300, deadline=None)
@given(HISTORY)
def test_in_any_history_a_closed_floor_stays_as_it_was_exported(
    history: tuple[list[list[Step]], list[tuple[int, int]]],
) -> None:
    scripts, checkpoints = history

    async def main() -> None:
        floor, clock = new_floor(), VirtualClock()
        episodes = [Scripted(f"e{i}", list(steps), floor, clock) for i, steps in enumerate(scripts)]
        tasks = [asyncio.create_task(one.run()) for one in episodes]
        for open_s, closed_s in checkpoints:
            await asyncio.sleep(open_s)
            before = {one.name: (one.track.place, one.exported) for one in episodes}
            floor.close()
            blockers = set(floor.blockers())
            assert blockers == {name for name, (place, _) in before.items() if place == "wait"}
            seen = [before[one.name] for one in episodes]
            for _ in range(closed_s):
                await asyncio.sleep(1)
                now = set(floor.blockers())
                assert now <= blockers, "nothing becomes a blocker"
                blockers = now
                for one, (place, exported) in zip(episodes, seen, strict=True):
                    if place in ("replay", "parked"):
                        assert one.exported == exported, "counted at the boundary before"
                        assert one.track.place != "ended"
            ready = [one.exported for one in episodes] if not blockers else None
            floor.open()
            if ready is not None and not closed_s:
                assert ready == [one.exported for one in episodes]
        await asyncio.gather(*tasks)
        for one, steps in zip(episodes, scripts, strict=True):
            assert one.taken == list(range(len(steps))), "every step was taken once"
            assert one.begun_closed == 0, "no step began while closed"
        assert floor.blockers() == []

    run_virtual(main())


@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=6), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_time_is_measured_in_steps_only_and_not_in_replay_steps_of_an_open_checkpoint(
    steps: list[Step], checkpoints: list[tuple[int, int]]
) -> None:
    steps = [Step(step.mode, step.takes_s) for step in steps]

    async def main() -> None:
        floor, clock = new_floor(), VirtualClock()
        one = Scripted("r", list(steps), floor, clock, limit_s=10_000.0)
        task = asyncio.create_task(one.run())
        stood_still_s = 0.0
        for open_s, closed_s in checkpoints:
            # Half seconds, so that no step ends at the very moment of a closing.
            await asyncio.sleep(open_s + 0.5)
            floor.close()
            for _ in range(closed_s * 4):
                if one.track.place == "replay":
                    stood_still_s += 0.25
                await asyncio.sleep(0.25)
            floor.open()
            await asyncio.sleep(0)
        await task
        total_s = sum(step.takes_s for step in steps)
        assert one.track.limit.used_s == pytest.approx(total_s - stood_still_s, abs=0.26 * len(checkpoints) + 0.01)

    run_virtual(main())
