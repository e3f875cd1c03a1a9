"""A whole episode, undisturbed and continued after a crash of everything."""

from pathlib import Path

from gymckpt.identity import EpisodeId
from tests.roles.town import Town, finished, soon
from tests.simulation.clock import run_virtual


def test_an_episode_runs_from_seed_to_reward(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        reply = await finished(town.run())
        assert reply["episode_id"] == {"rollout_id": "r", "attempt": 0}
        assert reply["result"]["reward"] == 1.0
        assert [item["type"] for item in reply["result"]["response"]["output"]] == [
            "function_call",
            "function_call_output",
        ] * 3 + ["message"]
        assert reply["result"]["response"]["usage"]["total_tokens"] == 44
        await soon()
        assert town.counter.totals == {}

    run_virtual(main())


def test_after_a_crash_of_everything_the_episode_goes_on_from_its_last_boundary(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 2))
        town.run()
        await town.hold.reached[("model", 2)].wait()
        checkpoint_id, committed = await town.checkpoint()
        for server in ("environment", "agent", "counter"):
            assert committed[server]["episode_ids"] == ["r"]
        await town.kill("environment", "agent", "counter")
        town.hold.let_go(("model", 2))
        for server in ("environment", "agent", "counter"):
            town.start(server)
        await town.restore(checkpoint_id, EpisodeId("r", 0))
        before = len(town.calls)
        reply = await finished(town.run(1))
        assert reply["result"]["reward"] == 1.0
        assert [seen for _, seen in town.calls[before:]] == [2, 3]
        assert town.audit == [("r", 0), ("r", 1), ("r-a1", 2)]
        assert town.calls[-1][0] == "/ng-rollout/r-a1/v1/responses"

    run_virtual(main())
