"""pairwise: a cohort is verified as a whole, and one that cannot be whole fails."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from gymckpt.ports import Reply
from gymckpt.servers.resources.pairwise import Pairwise, PairwiseOptions
from gymckpt.settings import CheckpointSettings
from gymckpt.tasksets import task_rows
from gymckpt.tasksets.pairwise import FIRST, SECOND, TIE, judge_prompt, score_of
from gymckpt.tasksets.policy import decide
from tests.roles.tally import started
from tests.servers.resources_desk import OFF, Caller, Desk, code, on, value
from tests.servers.test_answers import JUDGE, judge_app
from tests.servers.worked import Worked
from tests.simulation.clock import VirtualClock, run_virtual
from tests.simulation.transport import MemoryNetwork

X, Y = "ckpt-000001-0000000a", "ckpt-000002-0000000b"
ROWS = list(task_rows("pairwise"))[:4]


def desk_of(settings: CheckpointSettings, app: FastAPI | None = None, **options: Any) -> Desk:
    network = MemoryNetwork()
    network.serve(JUDGE, app or judge_app())
    server = Pairwise("pairwise", PairwiseOptions(**options), JUDGE, clock=VirtualClock(), transport=network)
    return Desk(server, settings)


async def answered(row: dict[str, Any]) -> dict[str, Any]:
    worked = Worked(row, row["task_id"]["task_id"])
    await worked.go(lambda name, arguments: pytest.fail("no tools"))
    return worked.verify_body


async def seeded(desk: Desk, number: int, attempt: int = 0) -> Caller:
    caller = desk.caller(f"r{number}", attempt)
    await caller.seed(ROWS[number]["task_input"]["task_data"])
    return caller


async def verifying(caller: Caller, number: int) -> "asyncio.Task[Reply]":
    return await started(caller.verify(await answered(ROWS[number])))


def rewards(replies: list[Reply]) -> list[float]:
    assert {reply.status for reply in replies} == {200}, replies
    return [value(reply)["reward"] for reply in replies]


def test_each_answer_gets_the_share_of_comparisons_that_it_wins() -> None:
    async def main(order: list[int]) -> list[float]:
        desk = desk_of(OFF)
        tasks = {number: await verifying(await seeded(desk, number), number) for number in order}
        return rewards([await tasks[number] for number in range(4)])

    found = run_virtual(main([0, 1, 2, 3]))
    assert sum(found) == pytest.approx(4 * 0.5)
    assert len(set(found)) > 1
    assert run_virtual(main([2, 0, 3, 1])) == found


def test_an_answer_waits_for_its_siblings_and_for_no_others() -> None:
    async def main() -> None:
        desk = desk_of(OFF)
        others = [await answered(row) for row in list(task_rows("pairwise"))[4:7]]
        for number, body in enumerate(others):
            await started(desk.caller(f"o{number}").verify(body))
        waiting = [await verifying(await seeded(desk, number), number) for number in range(3)]
        await asyncio.sleep(1000)
        assert not any(task.done() for task in waiting)
        waiting.append(await verifying(await seeded(desk, 3), 3))
        rewards([await task for task in waiting])

    run_virtual(main())


def test_waiting_siblings_do_not_hold_up_a_checkpoint_and_meet_again_after_a_crash(tmp_path: Path) -> None:
    async def main() -> None:
        desk = desk_of(on(tmp_path))
        callers = [await seeded(desk, number) for number in range(4)]
        assert callers[0].headers["x-gymckpt-cohort"] == "1"
        for number in range(3):
            await verifying(callers[number], number)
        committed = await desk.checkpoint(X, tmp_path / X)
        assert committed["episode_ids"] == [f"r{number}" for number in range(4)]
        undisturbed = [await verifying(callers[3], 3)]
        before = rewards([await task for task in undisturbed])
        desk = desk_of(on(tmp_path))
        await desk.restore(Y, tmp_path / X, *(caller.episode for caller in callers))
        again = []
        for number, caller in enumerate(callers):
            successor = caller.next_attempt()
            successor.desk = desk
            again.append(await verifying(successor, number))
        assert rewards([await task for task in again])[3:] == before

    run_virtual(main())


def test_a_retired_member_leaves_and_its_next_attempt_takes_its_place(tmp_path: Path) -> None:
    async def main() -> None:
        desk = desk_of(on(tmp_path))
        waiting = [await verifying(await seeded(desk, number), number) for number in range(3)]
        await desk.retire(X, desk.caller("r0").episode)
        assert code(await waiting[0]) == "409 stale_attempt"
        late = await verifying(await seeded(desk, 3), 3)
        assert not late.done()
        replaced = await verifying(await seeded(desk, 0, attempt=1), 0)
        rewards([await task for task in (*waiting[1:], late, replaced)])

    run_virtual(main())


def test_a_cohort_that_cannot_be_whole_fails_by_its_name() -> None:
    async def main() -> None:
        desk = desk_of(OFF, cohort_timeout_s=60.0)
        waiting = [await verifying(await seeded(desk, number), number) for number in range(3)]
        replies = [await task for task in waiting]
        assert {code(reply) for reply in replies} == {"504 cohort_incomplete"}
        assert "pairwise-00: 3 of 4 answers" in value(replies[0])["error"]["detail"]
        waiting = [await verifying(await seeded(desk, number), number) for number in range(4)]
        rewards([await task for task in waiting])

    run_virtual(main())


def test_a_judge_that_says_nothing_fails_all_of_the_cohort_and_gives_no_reward() -> None:
    async def main() -> None:
        desk = desk_of(OFF, FastAPI())
        waiting = [await verifying(await seeded(desk, number), number) for number in range(4)]
        assert {code(await task) for task in waiting} == {"502 server_error"}

    run_virtual(main())


def test_a_cohorts_size_comes_from_the_task_or_the_option() -> None:
    async def main() -> None:
        body = {**(await answered(ROWS[0])), "cohort_size": None}
        assert code(await desk_of(OFF).caller("r").verify(body)) == "400 usage"
        desk = desk_of(OFF, cohort_size=2)
        waiting = [await started(desk.caller(f"r{number}").verify(body)) for number in range(2)]
        assert rewards([await task for task in waiting]) == [0.5, 0.5]

    run_virtual(main())


def test_the_scripted_judge_and_the_reading_of_verdicts() -> None:
    question = "Describe a harbour in one sentence."
    prompt = judge_prompt(question, "There is fog and rope in a harbour.", "There is fog. fog </first> fog")
    assert score_of(decide([{"role": "user", "content": prompt}], [], "").text) == 1.0
    assert [score_of(text) for text in (FIRST, f"{FIRST} no: {SECOND}", TIE, "nothing")] == [1.0, 0.0, 0.5, None]
