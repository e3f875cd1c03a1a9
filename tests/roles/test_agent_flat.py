"""Flat rows sent to the agent itself: it owns the episode then."""

from pathlib import Path
from typing import Any

import pytest

from gymckpt.identity import EpisodeId
from tests.roles.town import ORDER, RestartOnlyCounter, Town, finished, json_of, soon
from tests.simulation.clock import run_virtual

ROW: dict[str, Any] = {
    "responses_create_params": {"input": "add up"},
    "wanted": 3,
    "agent_ref": {"name": "agent"},
    "_ng_task_index": 0,
    "_ng_rollout_index": 0,
    "_ng_rollout_id": "f",
}


def _row(attempt: int = 0, **fields: Any) -> dict[str, Any]:
    return {**ROW, "_ng_attempt_index": attempt, **fields}


def test_a_flat_row_gives_the_verifiers_reply(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        reply = await finished(town.post("agent", "/run", _row()))
        assert reply["reward"] == 1.0
        assert reply["responses_create_params"] == {"input": "add up"}
        assert len(reply["response"]["output"]) == 7
        await soon()
        assert town.counter.totals == {}

    run_virtual(main())


@pytest.mark.parametrize("place", [("model", 0), ("model", 2), "verify"])
def test_a_flat_episode_goes_on_from_its_last_boundary(tmp_path: Path, place: Any) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(place)
        town.post("agent", "/run", _row())
        await town.hold.reached[place].wait()
        checkpoint_id = town.next_id()
        ready = await town.prepare(checkpoint_id, within_s=5)
        assert ready == (place != "verify")
        town.hold.let_go(place)
        assert await town.prepare(checkpoint_id)
        committed = await town.commit(checkpoint_id)
        assert committed["agent"]["episode_ids"] == ["f"]
        await town.kill(*ORDER)
        for server in ORDER:
            town.start(server)
        await town.restore(checkpoint_id, EpisodeId("f"))
        before = len(town.calls)
        assert (await finished(town.post("agent", "/run", _row(1))))["reward"] == 1.0
        made = [seen for _, seen in town.calls[before:]]
        assert made == {"verify": [], ("model", 2): [2, 3], ("model", 0): [0, 1, 2, 3]}[place]
        assert town.counter.verified == (0 if place == "verify" else 1)

    run_virtual(main())


def test_a_flat_episode_is_admitted_like_one_of_an_environment_server(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 1))
        town.post("agent", "/run", _row())
        await town.hold.reached[("model", 1)].wait()
        assert json_of(await town.post("agent", "/run", _row()))["error"]["code"] == "checkpoint_conflict"
        checkpoint_id, _ = await town.checkpoint()
        await town.kill(*ORDER)
        town.hold.let_go(("model", 1))
        for server in ORDER:
            town.start(server)
        await town.restore(checkpoint_id, EpisodeId("f"))
        other = await town.post("agent", "/run", _row(1, wanted=4))
        assert json_of(other)["error"]["code"] == "checkpoint_error"
        closing = town.next_id()
        assert await town.prepare(closing)
        early = await town.post("agent", "/run", _row(1))
        assert json_of(early)["error"]["code"] == "admission_closed"
        await town.resume(closing)
        assert (await finished(town.post("agent", "/run", _row(1))))["reward"] == 1.0

    run_virtual(main())


def test_a_flat_failure_is_no_reward(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at("verify")
        running = town.post("agent", "/run", _row())
        await town.hold.reached["verify"].wait()
        await town.kill("counter")
        reply = await running
        assert reply.status == 502
        assert json_of(reply)["failure"]["stage"] == "verification"
        assert "reward" not in json_of(reply)

    run_virtual(main())


def test_a_flat_episode_on_a_server_that_captures_nothing_is_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, counter=RestartOnlyCounter)
        town.hold.at(("add", 0))
        running = town.post("agent", "/run", _row())
        await town.hold.reached[("add", 0)].wait()
        checkpoint_id, committed = await town.checkpoint()
        assert committed["agent"]["episode_ids"] == []
        town.hold.let_go(("add", 0))
        assert (await finished(running))["reward"] == 1.0
        assert checkpoint_id

    run_virtual(main())


def test_a_retired_flat_episode_is_stopped_and_cleaned_up(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 1))
        running = town.post("agent", "/run", _row())
        await town.hold.reached[("model", 1)].wait()
        await town.retire(EpisodeId("f"), servers=("agent",))
        assert json_of(await running)["error"]["code"] == "stale_attempt"
        assert town.counter.totals == {}
        assert town.roles["agent"].live() == []

    run_virtual(main())
