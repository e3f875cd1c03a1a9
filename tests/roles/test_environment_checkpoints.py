"""What a checkpoint sees of running episodes, and what it waits for."""

from pathlib import Path

from gymckpt.identity import EpisodeId
from tests.roles.town import ORDER, ReplayedCounter, RestartOnlyCounter, Town, finished, json_of, soon
from tests.simulation.clock import run_virtual

R = EpisodeId("r")


def test_a_model_call_never_blocks_a_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 0))
        running = town.run()
        await town.hold.reached[("model", 0)].wait()
        await town.checkpoint()
        town.hold.let_go(("model", 0))
        assert (await finished(running))["result"]["reward"] == 1.0

    run_virtual(main())


def test_a_tool_round_is_waited_for_and_then_the_episode_parks(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("add", 1))
        running = town.run()
        await town.hold.reached[("add", 1)].wait()
        checkpoint_id = town.next_id()
        assert await town.prepare(checkpoint_id, ("environment",))
        assert not await town.prepare(checkpoint_id, ("agent",), within_s=5)
        status = json_of(await town.ask("agent", "status"))
        assert status["report"]["blockers"] == ["r"]
        town.hold.let_go(("add", 1))
        assert await town.prepare(checkpoint_id)
        calls = list(town.calls)
        await soon()
        assert town.calls == calls, "the next model call waits for the resume"
        await town.resume(checkpoint_id)
        assert (await finished(running))["result"]["reward"] == 1.0

    run_virtual(main())


def test_a_reply_that_comes_while_a_checkpoint_is_open_is_not_acted_on(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 1))
        running = town.run()
        await town.hold.reached[("model", 1)].wait()
        checkpoint_id = town.next_id()
        assert await town.prepare(checkpoint_id)
        town.hold.let_go(("model", 1))
        await soon()
        assert town.audit == [("r", 0)], "no tool was called"
        committed = await town.commit(checkpoint_id)
        assert committed["agent"]["manifest"]["checkpoint_id"] == checkpoint_id
        await town.resume(checkpoint_id)
        assert (await finished(running))["result"]["reward"] == 1.0
        await town.kill(*ORDER)
        for server in ORDER:
            town.start(server)
        await town.restore(checkpoint_id, R)
        before = len(town.calls)
        assert (await finished(town.run(1)))["result"]["reward"] == 1.0
        assert [seen for _, seen in town.calls[before:]] == [1, 2, 3], "the held call is made again"

    run_virtual(main())


def test_a_restore_goes_on_with_the_tools_of_a_response_that_was_already_received(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 1))
        town.run()
        await town.hold.reached[("model", 1)].wait()
        checkpoint_id = town.next_id()
        assert await town.prepare(checkpoint_id)
        town.hold.let_go(("model", 1))
        await soon()
        # As if the next checkpoint came right after this one, before the parked session can wake: it stays parked.
        agent = town.roles["agent"]
        agent.open()
        agent.close()
        await soon()
        assert town.audit == [("r", 0)]
        await town.commit(checkpoint_id)
        await town.kill(*ORDER)
        for server in ORDER:
            town.start(server)
        await town.restore(checkpoint_id, R)
        before = len(town.calls)
        assert (await finished(town.run(1)))["result"]["reward"] == 1.0
        assert town.audit == [("r", 0), ("r-a1", 1), ("r-a1", 2)]
        assert [seen for _, seen in town.calls[before:]] == [2, 3], "the model is not asked for the second round again"

    run_virtual(main())


def test_an_episode_that_is_being_seeded_has_no_boundary_yet(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at("seed")
        running = town.run()
        await town.hold.reached["seed"].wait()
        checkpoint_id = town.next_id()
        assert await town.prepare(checkpoint_id, ("environment", "agent"))
        town.hold.let_go("seed")
        assert await town.prepare(checkpoint_id)
        committed = await town.commit(checkpoint_id)
        assert committed["environment"]["episode_ids"] == ["r"]
        assert committed["environment"]["needs_by_episode"] == {"r": None}
        await town.resume(checkpoint_id)
        assert (await finished(running))["result"]["reward"] == 1.0

    run_virtual(main())


def test_verify_in_wait_mode_blocks_and_its_result_is_kept_at_the_return_boundary(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at("verify")
        running = town.run()
        await town.hold.reached["verify"].wait()
        checkpoint_id = town.next_id()
        assert not await town.prepare(checkpoint_id, ("environment",), within_s=5)
        town.hold.let_go("verify")
        assert await town.prepare(checkpoint_id)
        await soon()
        assert not running.done(), "the episode is parked at return"
        committed = await town.commit(checkpoint_id)
        assert committed["environment"]["needs_by_episode"] == {"r": []}
        await town.kill(*ORDER)
        for server in ORDER:
            town.start(server)
        await town.restore(checkpoint_id, R)
        assert (await finished(town.run(1)))["result"]["reward"] == 1.0
        assert town.counter.verified == 0, "verify does not run twice"

    run_virtual(main())


def test_a_replayable_verify_blocks_nobody_and_runs_again(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, counter=ReplayedCounter)
        town.hold.at("verify")
        town.run()
        await town.hold.reached["verify"].wait()
        checkpoint_id = town.next_id()
        assert await town.prepare(checkpoint_id, ("environment", "agent"))
        # The resources server itself waits for it, because it holds state.
        town.hold.let_go("verify")
        assert await town.prepare(checkpoint_id)
        committed = await town.commit(checkpoint_id)
        assert committed["environment"]["needs_by_episode"] == {"r": [["resources", "counter"]]}
        await town.kill(*ORDER)
        for server in ORDER:
            town.start(server)
        await town.restore(checkpoint_id, R)
        assert (await finished(town.run(1)))["result"]["reward"] == 1.0
        assert town.counter.verified == 1

    run_virtual(main())


def test_a_server_that_cannot_capture_makes_its_episodes_restarts_that_never_block(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, counter=RestartOnlyCounter)
        town.hold.at(("add", 1))
        running = town.run()
        await town.hold.reached[("add", 1)].wait()
        checkpoint_id = town.next_id()
        assert await town.prepare(checkpoint_id)
        for server in ("environment", "agent"):
            assert json_of(await town.ask(server, "status"))["report"]["restarts"] == ["r"]
        committed = await town.commit(checkpoint_id)
        assert committed["environment"]["episode_ids"] == []
        assert committed["agent"]["episode_ids"] == []
        town.hold.let_go(("add", 1))
        await town.resume(checkpoint_id)
        assert (await finished(running))["result"]["reward"] == 1.0, "it runs on when there is no crash"

    run_virtual(main())


def test_numbers_count_boundaries_of_environment_and_agent_together(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 2))
        town.hold.at("verify")
        town.run()
        await town.hold.reached[("model", 2)].wait()
        # seed; activation begun; two rounds of reply and tools.
        agent = [session.track.exported.boundary.number for session in town.roles["agent"].sessions]
        assert agent == [6]
        checkpoint_id, _ = await town.checkpoint()
        await town.kill(*ORDER)
        for server in ORDER:
            town.start(server)
        await town.restore(checkpoint_id, R)
        town.hold.let_go(("model", 2))
        town.run(1)
        await town.hold.reached["verify"].wait()
        (episode,) = list(town.roles["environment"]._episodes)
        # and then: reply, tools, the last reply; after the agent; the agent closed.
        assert str(episode.track.exported.boundary) == "verify/11"
        assert episode.track.exported.turns == 4

    run_virtual(main())
