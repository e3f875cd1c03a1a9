"""A failure says where and how; it is never a reward."""

from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from gymckpt.errors import BackendUnavailable
from gymckpt.identity import EpisodeId
from tests.roles.town import ORDER, Town, finished, json_of, soon
from tests.simulation.clock import run_virtual
from tests.simulation.transport import Fault


def _failure(reply: dict[str, Any]) -> tuple[str, str]:
    assert "result" not in reply
    return reply["failure"]["stage"], reply["failure"]["failure_kind"]


def test_a_resources_server_that_was_started_again_empty_gives_no_wrong_reward(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 1))
        running = town.run()
        await town.hold.reached[("model", 1)].wait()
        await town.kill("counter")
        town.start("counter")
        town.hold.let_go(("model", 1))
        assert _failure(await finished(running)) == ("agent", "unknown_session")

    run_virtual(main())


def test_an_agent_that_dies_fails_the_episode_at_its_stage(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 1))
        running = town.run()
        await town.hold.reached[("model", 1)].wait()
        await town.kill("agent")
        assert _failure(await finished(running)) == ("agent", "server_error")

    run_virtual(main())


@pytest.mark.parametrize(("path", "stage"), [("/seed_session", "seed"), ("/verify", "verification"), ("/add", "agent")])
def test_a_connection_that_breaks_is_no_request_to_send_again(tmp_path: Path, path: str, stage: str) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.network.faults.append(Fault("lost_reply", "counter", path))
        assert _failure(await finished(town.run())) == (stage, "server_error")
        assert sum(exchange.path.endswith(path) for exchange in town.network.exchanges) == 1

    run_virtual(main())


def test_a_refused_connection_is_tried_again_for_a_while(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.network.faults.append(Fault("refused", "counter", "/verify", times=4))
        assert (await finished(town.run()))["result"]["reward"] == 1.0
        town.network.faults.append(Fault("refused", "counter", "/verify", times=10_000))
        started = town.clock.monotonic()
        assert _failure(await finished(town.run(rollout="q"))) == ("verification", "not_sent")
        assert town.clock.monotonic() - started < 60

    run_virtual(main())


def test_an_outage_of_inference_reaches_the_collector_by_its_own_name(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        error = BackendUnavailable("no backend answers")
        away = FastAPI()

        @away.post("/v1/responses")
        @away.post("/ng-rollout/{key}/v1/responses")
        async def respond() -> JSONResponse:
            return JSONResponse({"error": {"code": error.code, "detail": error.detail}}, error.http_status)

        town.network.serve(town.servers["model"], away)
        assert _failure(await finished(town.run())) == ("agent", "backend_unavailable")

    run_virtual(main())


def test_a_failure_that_comes_while_a_checkpoint_is_open_comes_after_it(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 1))
        running = town.run()
        await town.hold.reached[("model", 1)].wait()
        checkpoint_id = town.next_id()
        assert await town.prepare(checkpoint_id)
        await town.kill("agent")
        await soon()
        assert not running.done()
        committed = await town.control(
            "environment",
            "commit",
            checkpoint_id=checkpoint_id,
            checkpoint_dir=town.directory(checkpoint_id),
            episode_ids=None,
        )
        assert committed["episode_ids"] == ["r"]
        for server in ("counter", "environment"):
            await town.control(server, "resume", checkpoint_id=checkpoint_id)
        assert _failure(await finished(running)) == ("agent", "server_error")

    run_virtual(main())


def test_the_time_limit_ends_an_episode_and_stands_still_during_checkpoints(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, environment={"episode_timeout_s": 100.0})
        town.hold.at(("model", 1))
        running = town.run()
        await town.hold.reached[("model", 1)].wait()
        await town.clock.sleep_until(town.clock.monotonic() + 60)
        checkpoint_id = town.next_id()
        assert await town.prepare(checkpoint_id)
        await town.clock.sleep_until(town.clock.monotonic() + 500)
        await town.resume(checkpoint_id)
        began = town.clock.monotonic()
        assert _failure(await finished(running)) == ("agent", "time_limit")
        assert town.clock.monotonic() - began == pytest.approx(40, abs=1)
        await soon()
        assert town.counter.totals == {}

    run_virtual(main())


def test_a_restored_episode_gets_the_time_that_was_left_at_its_boundary(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, environment={"episode_timeout_s": 100.0})
        town.hold.at("seed")
        town.hold.at(("model", 0))
        town.run()
        await town.hold.reached["seed"].wait()
        await town.clock.sleep_until(town.clock.monotonic() + 70)
        town.hold.let_go("seed")
        await town.hold.reached[("model", 0)].wait()
        checkpoint_id, _ = await town.checkpoint()
        await town.kill(*ORDER)
        for server in ORDER:
            town.start(server)
        await town.restore(checkpoint_id, EpisodeId("r"))
        began = town.clock.monotonic()
        assert _failure(await finished(town.run(1))) == ("agent", "time_limit")
        assert town.clock.monotonic() - began == pytest.approx(30, abs=1)

    run_virtual(main())


def test_a_model_that_refuses_the_request_for_good_is_a_terminal_failure(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        app = FastAPI()

        async def refuse() -> JSONResponse:
            return JSONResponse({"detail": "too long"}, 400)

        app.add_api_route("/ng-rollout/{key}/v1/responses", refuse, methods=["POST"])
        town.network.serve(town.servers["model"], app)
        reply = await finished(town.run())
        assert _failure(reply) == ("agent", "http_400")
        assert reply["failure"]["terminal"] is True

    run_virtual(main())


def test_with_checkpoints_off_there_is_no_route_and_no_header_of_ours(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, checkpoints=False)
        reply = await town.run()
        assert json_of(reply)["result"]["reward"] == 1.0
        assert not [name for name in reply.headers if name.startswith("x-")]
        assert (await town.ask("environment", "status")).status == 404
        assert (await town.ask("agent", "status")).status == 404
        paths = [exchange.path for exchange in town.network.exchanges]
        assert "/seed_session" in paths
        assert "/verify" in paths
        assert "/ng-rollout/r/v1/responses" in paths, "the agent's activation always carries it"

    run_virtual(main())


def test_a_flat_row_runs_like_a_typed_one(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        row = {
            "responses_create_params": {"input": "add up"},
            "wanted": 3,
            "agent_ref": {"name": "agent"},
            "_ng_task_index": 4,
            "_ng_rollout_index": 2,
        }
        reply = await finished(town.post("environment", "/run", row))
        assert reply["reward"] == 1.0
        assert town.calls[0][0] == "/ng-rollout/4-2/v1/responses"
        await finished(town.post("environment", "/run", {**row, "_ng_rollout_id": "mine", "_ng_attempt_index": 2}))
        assert town.calls[-1][0] == "/ng-rollout/mine-a2/v1/responses"
        bad = await town.post("environment", "/run", {"wanted": 3})
        assert bad.status == 400

    run_virtual(main())
