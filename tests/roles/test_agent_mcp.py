"""An agent that reaches its tools over MCP: the same episodes, across checkpoints and a crash, and no token kept."""

from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from gymckpt.identity import EpisodeId
from gymckpt.servers.resources.app import resources_app
from gymckpt.wire.gym import MCP_SESSION_HEADER
from tests.roles.town import ORDER, Town, finished, json_of
from tests.simulation.clock import InlineOffload, run_virtual

pytest.importorskip("mcp", reason="the extra mcp is not installed")

OVER_MCP = {"resources_tool_transports": ["mcp"]}


class McpTown(Town):
    """Its counter speaks MCP, and its environment says so to the agent."""

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, environment=OVER_MCP, **options)

    def start(self, name: str) -> None:
        super().start(name)
        if name == "counter":
            self.network.serve(self.servers[name], self._speaking())

    def _speaking(self) -> FastAPI:
        shared: dict[str, Any] = {"clock": self.clock, "offload": InlineOffload()}
        return resources_app(self.counter, self._settings, expose_tools_over_mcp=True, **shared)

    def paths(self) -> list[str]:
        """Of the requests that reached the counter and were no control calls."""
        found = [exchange for exchange in self.network.exchanges if exchange.server == "counter"]
        return [exchange.path for exchange in found if "/checkpoint/" not in exchange.path]


def test_tools_are_called_over_mcp_when_the_environment_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        town = McpTown(tmp_path)
        response = (await finished(town.run()))["result"]
        assert response["reward"] == 1.0
        outputs = [item["output"] for item in response["response"]["output"] if "output" in item]
        assert outputs == ['{"total":1}', '{"total":2}', '{"total":3}']
        assert town.paths().count("/mcp") == 3

    run_virtual(main())


def test_a_restored_session_asks_for_a_token_of_its_own_and_none_is_in_a_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        town = McpTown(tmp_path)
        town.hold.at(("model", 2))
        town.run()
        await town.hold.reached["model", 2].wait()
        source, committed = await town.checkpoint()
        assert committed["agent"]["episode_ids"] == ["r"]
        seeded = [e for e in town.network.exchanges if e.path == "/v1/agent_sessions"]
        token = seeded[0].body["tool_accesses"][0]["connection"]["headers"][MCP_SESSION_HEADER]
        records = [record async for record in town.roles["agent"].export(None)]
        assert token not in repr([record.record for record in records])
        await town.kill(*ORDER)
        for name in ORDER:
            town.start(name)
        town.hold.let_go(("model", 2))
        await town.restore(source, EpisodeId("r"))
        assert (await finished(town.run(attempt=1)))["result"]["reward"] == 1.0
        assert town.paths().count("/ng-control/v1/mcp-access") == 1

    run_virtual(main())


def test_a_server_that_gives_no_token_anew_makes_the_episode_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        town = McpTown(tmp_path)
        town.hold.at(("model", 1))
        running = town.run()
        await town.hold.reached["model", 1].wait()
        assert json_of(await town.ask("agent", "status"))["report"]["restarts"] == ["r"]
        town.hold.let_go(("model", 1))
        await finished(running)

    monkeypatch.setattr("gymckpt.servers.resources.app.EXTENSION_MCP_ACCESS", "something_else")
    run_virtual(main())


def test_a_server_without_mcp_fails_the_episode_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, environment=OVER_MCP)
        failure = (await finished(town.run()))["failure"]
        assert (failure["failure_kind"], failure["terminal"]) == ("no_mcp", True)

    run_virtual(main())
