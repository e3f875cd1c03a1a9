"""Who may start, and what an episode's end leaves behind."""

from pathlib import Path

from gymckpt.identity import EpisodeId
from tests.roles.town import ORDER, Town, finished, json_of, soon
from tests.simulation.clock import run_virtual

R = EpisodeId("r")


async def _crashed_and_restored(town: Town) -> None:
    """`r` was at its second model call when everything died; restored, not resumed."""
    town.hold.at(("model", 1))
    town.run()
    await town.hold.reached[("model", 1)].wait()
    checkpoint_id, _ = await town.checkpoint()
    await town.kill(*ORDER)
    town.hold.let_go(("model", 1))
    for server in ORDER:
        town.start(server)
    for server in ORDER:
        await town.control(
            server,
            "restore",
            checkpoint_id="ckpt-000099-00000000",
            checkpoint_dir=town.directory(checkpoint_id),
            episode_ids=[{"rollout_id": "r", "attempt": 0}],
        )


def test_no_episode_starts_while_closed(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        checkpoint_id = town.next_id()
        assert await town.prepare(checkpoint_id)
        reply = await town.run()
        assert (reply.status, json_of(reply)["error"]["code"]) == (409, "admission_closed")
        await town.resume(checkpoint_id)
        assert (await finished(town.run()))["result"]["reward"] == 1.0

    run_virtual(main())


def test_a_replacement_is_admitted_only_after_the_resume_and_only_with_its_own_task(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        await _crashed_and_restored(town)
        early = await town.run(1)
        assert json_of(early)["error"]["code"] == "admission_closed"
        await town.resume("ckpt-000099-00000000")
        assert json_of(await town.ask("environment", "status"))["restored_pending"] == 1
        other = await town.run(1, wanted=7)
        assert (other.status, json_of(other)["error"]["code"]) == (409, "checkpoint_error")
        older = await town.run(0)
        assert json_of(older)["error"]["code"] == "stale_attempt"
        assert json_of(await town.ask("environment", "status"))["restored_pending"] == 1, "refusals take nothing away"
        running = town.run(1)
        await soon(20)
        assert json_of(await town.ask("environment", "status"))["restored_pending"] == 0
        assert (await finished(running))["result"]["reward"] == 1.0

    run_virtual(main())


def test_what_was_restored_and_not_yet_sent_is_part_of_the_next_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        await _crashed_and_restored(town)
        await town.resume("ckpt-000099-00000000")
        checkpoint_id, committed = await town.checkpoint()
        for server in ORDER:
            assert committed[server]["episode_ids"] == ["r-a1"]
        await town.kill(*ORDER)
        for server in ORDER:
            town.start(server)
        await town.restore(checkpoint_id, EpisodeId("r", 4))
        before = len(town.calls)
        assert (await finished(town.run(5)))["result"]["reward"] == 1.0
        assert [seen for _, seen in town.calls[before:]] == [1, 2, 3]

    run_virtual(main())


def test_a_running_attempt_cannot_be_started_again(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 0))
        running = town.run()
        await town.hold.reached[("model", 0)].wait()
        again = await town.run()
        assert (again.status, json_of(again)["error"]["code"]) == (409, "checkpoint_conflict")
        town.hold.let_go(("model", 0))
        assert (await finished(running))["result"]["reward"] == 1.0

    run_virtual(main())


def test_a_retire_stops_the_episode_cleans_up_and_fences_the_attempt(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 1))
        running = town.run()
        await town.hold.reached[("model", 1)].wait()
        await town.retire(R, servers=("environment",))
        assert json_of(await running)["error"]["code"] == "stale_attempt"
        assert town.counter.totals == {}
        assert list(town.roles["agent"].sessions) == []
        assert json_of(await town.run())["error"]["code"] == "stale_attempt"
        town.hold.let_go(("model", 1))
        assert (await finished(town.run(1)))["result"]["reward"] == 1.0

    run_virtual(main())


def test_a_later_attempt_takes_the_place_of_a_running_one(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 1))
        first = town.run()
        await town.hold.reached[("model", 1)].wait()
        town.hold.let_go(("model", 1))
        second = town.run(1)
        assert json_of(await first)["error"]["code"] == "stale_attempt"
        assert (await finished(second))["result"]["reward"] == 1.0
        assert json_of(await town.run(0))["error"]["code"] == "stale_attempt"

    run_virtual(main())


def test_a_caller_that_goes_away_does_not_end_the_episode(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 1))
        running = town.run()
        await town.hold.reached[("model", 1)].wait()
        running.cancel()
        await soon()
        town.hold.let_go(("model", 1))
        await soon(2000)
        assert town.counter.verified == 1

    run_virtual(main())


def test_a_task_set_without_a_server_is_a_terminal_failure(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        body = {
            "episode_id": {"rollout_id": "x"},
            "task": {"task_id": {"taskset": "none", "task_id": "1"}, "task_input": {"responses_create_params": {}}},
        }
        reply = json_of(await town.post("environment", "/run", body))
        assert reply["failure"]["failure_kind"] == "unknown_taskset"
        assert (reply["failure"]["terminal"], reply["failure"]["stage"]) == (True, "admission")

    run_virtual(main())
