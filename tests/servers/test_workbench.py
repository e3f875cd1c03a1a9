"""The workbench: its tasks can be done, its verdicts are right, and its state survives."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.roles.resources_hooks import SessionStateError
from gymckpt.servers.resources.workbench.database import contents, new_database, open_database
from gymckpt.servers.resources.workbench.server import Workbench, WorkbenchOptions
from gymckpt.servers.resources.workbench.tools import TOOL_NAMES, run_tool
from gymckpt.servers.resources.workbench.verifier import verdict
from gymckpt.tasksets import task_rows
from gymckpt.tasksets.workbench import MAX_ROUNDS, MIN_ROUNDS, solution_of
from gymckpt.tasksets.workbench_tools import WORKBENCH_TOOLS
from tests.servers.resources_desk import OFF, Desk, code, on, value
from tests.servers.worked import Worked
from tests.simulation.clock import InlineOffload, VirtualClock, run_virtual

TASKS = list(task_rows("workbench"))
X, Y = "ckpt-000001-0000000a", "ckpt-000002-0000000b"


def workbench(**options: Any) -> Workbench:
    return Workbench("workbench", WorkbenchOptions(**options), clock=VirtualClock(), offload=InlineOffload())


def worked_directly(row: dict[str, Any], seed: str) -> tuple[float, int]:
    """Reward and rounds of the policy on a database of its own."""
    worked = Worked(row, seed)
    database = new_database(worked.task_data["office"])

    async def use(name: str, arguments: dict[str, Any]) -> Any:
        return run_tool(database, name, arguments)

    try:
        asyncio.run(worked.go(use))
        return verdict(database, worked.task_data)["reward"], worked.rounds
    finally:
        database.close()


def test_the_reference_solution_of_every_task_is_right_and_6_to_25_rounds_long() -> None:
    for row in TASKS:
        data = row["task_input"]["task_data"]
        database = new_database(data["office"])
        solution = solution_of(data)
        answers = [run_tool(database, call.name, call.arguments) for calls in solution for call in calls]
        assert not [answer for answer in answers if "error" in answer], row["task_id"]
        assert verdict(database, data) == {"reward": 1.0, "differences": []}, row["task_id"]
        assert MIN_ROUNDS <= len(solution) <= MAX_ROUNDS
        database.close()


def test_doing_nothing_is_never_right() -> None:
    for row in TASKS:
        database = new_database(row["task_input"]["task_data"]["office"])
        assert verdict(database, row["task_input"]["task_data"])["reward"] == 0.0, row["task_id"]
        database.close()


def test_the_scripted_policy_solves_most_tasks_and_errs_sometimes() -> None:
    rewards = [worked_directly(row, row["task_id"]["task_id"]) for row in TASKS]
    assert 0.75 <= sum(reward for reward, _ in rewards) / len(rewards) <= 0.93
    assert all(MIN_ROUNDS - 1 <= rounds <= MAX_ROUNDS for _, rounds in rewards)


def test_every_tool_on_offer_is_there_and_used_by_some_task() -> None:
    used = Counter(c.name for row in TASKS for calls in solution_of(row["task_input"]["task_data"]) for c in calls)
    assert set(used) == set(TOOL_NAMES) == {tool["name"] for tool in WORKBENCH_TOOLS}
    assert len(TOOL_NAMES) >= 12


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("get_stock", {}, "takes exactly the arguments sku"),
        ("get_stock", {"sku": "P999"}, "there is no product 'P999'"),
        ("get_order", {"order_id": "5001"}, "order_id is not of type integer"),
        ("get_order", {"order_id": True}, "order_id is not of type integer"),
        ("get_order", {"order_id": 2**70}, "a number is too large"),
        ("add_order_line", {"order_id": 5001, "sku": "P201", "quantity": 0}, "at least 1"),
        (
            "transfer_stock",
            {"sku": "P201", "source": "Hamburg", "target": "Mars", "quantity": 1},
            "no warehouse 'Mars'",
        ),
        (
            "transfer_stock",
            {"sku": "P201", "source": "Hamburg", "target": "Lyon", "quantity": 10**6},
            "Hamburg has fewer than 1000000 of P201",
        ),
        ("create_event", {"title": "", "day": "", "start": "", "minutes": 1, "attendees": [1]}, "list of strings"),
    ],
)
def test_a_refused_call_changes_nothing_and_says_why(name: str, arguments: dict[str, Any], error: str) -> None:
    database = new_database("any")
    before = contents(database)
    assert error in run_tool(database, name, arguments)["error"]
    assert contents(database) == before
    database.close()


def test_a_shipment_that_fails_halfway_takes_nothing_from_stock() -> None:
    database = new_database("any")
    order_id = run_tool(database, "create_order", {"customer_id": "C101"})["order_id"]
    for sku, quantity in (("P201", 1), ("P202", 10**6)):
        run_tool(database, "add_order_line", {"order_id": order_id, "sku": sku, "quantity": quantity})
    before = contents(database)
    assert "fewer than" in run_tool(database, "ship_order", {"order_id": order_id, "warehouse": "Lyon"})["error"]
    assert contents(database) == before
    database.close()


def test_the_order_in_which_rows_were_made_does_not_matter() -> None:
    notes = [{"customer_id": "C101", "text": "one"}, {"customer_id": "C102", "text": "two"}]
    databases = [new_database("any"), new_database("any")]
    for database, wanted in zip(databases, (notes, notes[::-1]), strict=True):
        for note in wanted:
            run_tool(database, "add_note", note)
    assert contents(databases[0]) == contents(databases[1])
    for database in databases:
        database.close()


@pytest.mark.parametrize("data", [b"", b"no database", b"SQLite format 3\0" + bytes(4096)])
def test_bytes_that_are_no_database_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="database"):
        open_database(data)


async def _half_done(desk: Desk, row: dict[str, Any], seed: str) -> tuple[Any, Worked]:
    caller, worked = desk.caller("r"), Worked(row, seed)
    assert (await caller.seed(worked.task_data)).status == 200
    assert not await worked.go(caller.use, max_rounds=4)
    return caller, worked


def _solved(tasks: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Tasks that the policy does right, and whose first rounds change something."""
    reads = {"find", "get", "list", "search", "read"}
    found = []
    for row in tasks:
        early = [c.name for calls in solution_of(row["task_input"]["task_data"])[:4] for c in calls]
        if any(name.partition("_")[0] not in reads for name in early) and worked_directly(row, "s")[0] == 1.0:
            found.append(row)
        if len(found) == count:
            break
    return found


def test_a_session_restored_in_another_process_ends_with_the_reward_of_an_undisturbed_one(tmp_path: Path) -> None:
    async def main(row: dict[str, Any], directory: Path) -> float:
        desk = Desk(workbench(), on(tmp_path))
        caller, worked = await _half_done(desk, row, "s")
        committed = await desk.checkpoint(X, directory)
        assert committed["episode_ids"] == ["r"]
        desk.boot(workbench())
        assert (await desk.restore(Y, directory, EpisodeId("r")))["restored"] == ["r-a1"]
        successor = caller.next_attempt()
        assert await worked.go(successor.use)
        verified = value(await successor.verify(worked.verify_body))
        reward: float = verified["reward"]
        return reward

    for number, row in enumerate(_solved(TASKS, 5)):
        assert run_virtual(main(row, tmp_path / f"checkpoint-{number}")) == 1.0


def test_lost_state_would_have_changed_the_reward() -> None:
    async def main(row: dict[str, Any]) -> float:
        desk = Desk(workbench(), OFF)
        _, worked = await _half_done(desk, row, "s")
        desk.boot(workbench())
        caller = desk.caller("r")
        await caller.seed(worked.task_data)  # an empty session, as if nothing had been done
        await worked.go(caller.use)
        reward: float = value(await caller.verify(worked.verify_body))["reward"]
        return reward

    assert [run_virtual(main(row)) for row in _solved(TASKS, 5)] == [0.0] * 5


@pytest.mark.parametrize("enabled", [True, False])
def test_a_workbench_started_again_empty_refuses_instead_of_answering_from_nothing(
    tmp_path: Path, enabled: bool
) -> None:
    async def main() -> None:
        desk = Desk(workbench(), on(tmp_path) if enabled else OFF)
        caller, worked = await _half_done(desk, TASKS[0], "s")
        desk.boot(workbench())
        assert code(await caller.tool("get_stock", {"sku": "P201"})) == "409 unknown_session"
        assert code(await caller.verify(worked.verify_body)) == "409 unknown_session"

    run_virtual(main())


def test_a_line_is_audited_before_each_call_and_its_index_goes_on_after_a_restore(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"

    async def main() -> None:
        desk = Desk(workbench(audit_path=audit), on(tmp_path))
        caller = desk.caller("r")
        await caller.seed(Worked(TASKS[0], "s").task_data)
        await caller.use("get_stock", {"sku": "P201"})
        await caller.use("get_stock", {"sku": "P202"})
        await desk.checkpoint(X, tmp_path / X)
        await caller.use("get_stock", {"sku": "P203"})
        desk.boot(workbench(audit_path=audit))
        await desk.restore(Y, tmp_path / X, EpisodeId("r"))
        await caller.next_attempt().use("list_events", {"day": "2031-03-03"})

    run_virtual(main())
    lines = [jsoncodec.loads(line) for line in audit.read_bytes().splitlines()]
    assert [(line["rollout_id"], line["attempt"], line["call"], line["tool"]) for line in lines] == [
        ("r", 0, 1, "get_stock"),
        ("r", 0, 2, "get_stock"),
        ("r", 0, 3, "get_stock"),
        ("r", 1, 3, "list_events"),
    ]
    assert all(line["server"] == "workbench" for line in lines)


def test_a_damaged_state_is_refused_by_name() -> None:
    async def main() -> None:
        server = workbench()
        good = {"database": "bm8gZGF0YWJhc2U=", "calls": 1}
        with pytest.raises(SessionStateError, match=r"session s-1: .*database"):
            await server.validate_session_states({"s-1": good})

    run_virtual(main())


def test_calls_take_longer_only_when_told_so() -> None:
    async def main(latency_s: float) -> float:
        desk = Desk(workbench(tool_latency_s=latency_s), OFF)
        caller = desk.caller("r")
        await caller.seed(Worked(TASKS[0], "s").task_data)
        begin = desk.clock.monotonic()
        await caller.use("get_stock", {"sku": "P201"})
        return desk.clock.monotonic() - begin

    assert run_virtual(main(0.0)) == 0.0
    assert run_virtual(main(2.5)) == pytest.approx(2.5)


def test_a_task_of_another_set_is_refused_at_its_seed() -> None:
    async def main() -> None:
        reply = await Desk(workbench(), OFF).caller("r").seed({"match": "exact"})
        assert code(reply) == "400 usage"

    run_virtual(main())
