"""A tool call of a dead attempt, still on its way when the successor is there, must never be the successor's."""

from pathlib import Path

import pytest

from gymckpt.identity import EpisodeId
from gymckpt.wire.control import EXTENSION_ROLLOUT_PREFIX
from tests.roles.town import ORDER, Town, finished, json_of
from tests.simulation.clock import run_virtual
from tests.simulation.transport import Exchange


def tool_calls(town: Town) -> list[Exchange]:
    return [exchange for exchange in town.network.exchanges if exchange.path.endswith("/add")]


def test_a_tool_call_names_its_attempt_wherever_the_server_takes_that(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        await finished(town.run(attempt=2))
        assert [call.path for call in tool_calls(town)] == ["/ng-rollout/r-a2/add"] * 3

    run_virtual(main())


def test_a_server_without_the_extension_is_called_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        await finished(town.run(attempt=2))
        assert [call.path for call in tool_calls(town)] == ["/add"] * 3

    monkeypatch.setattr("gymckpt.participant.participant.EXTENSIONS", ("probe",))
    run_virtual(main())


def test_without_checkpoints_no_call_carries_anything_of_ours(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, checkpoints=False)
        await finished(town.run())
        assert [call.path for call in tool_calls(town)] == ["/add"] * 3

    run_virtual(main())


def test_a_tool_call_of_a_dead_attempt_is_refused_and_never_runs(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 2))
        town.run()
        await town.hold.reached["model", 2].wait()
        source, _ = await town.checkpoint()
        late = tool_calls(town)[-1]
        await town.kill(*ORDER)
        for name in ORDER:
            town.start(name)
        town.hold.let_go(("model", 2))
        await town.restore(source, EpisodeId("r"))
        audited = list(town.audit)
        refused = await town.post("counter", late.path, late.body, cookies=late.cookies)
        assert (refused.status, json_of(refused)["error"]["code"]) == (409, "stale_attempt")
        assert town.audit == audited
        result = (await finished(town.run(attempt=1)))["result"]
        assert result["reward"] == 1.0
        assert tool_calls(town)[-1].path == "/ng-rollout/r-a1/add"

    run_virtual(main())


def test_the_extension_is_in_every_participants_status(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        for name in ORDER:
            assert EXTENSION_ROLLOUT_PREFIX in json_of(await town.ask(name, "status"))["extensions"]

    run_virtual(main())
