"""The agent server's hops, field by field as Gym's own agent and environment server make them."""

from pathlib import Path
from typing import Any

from tests.roles.town import Town, finished, soon
from tests.simulation.clock import run_virtual


def _keys(value: Any) -> list[str]:
    return sorted(value)


def test_every_hop_of_an_episode_has_the_fields_that_gyms_servers_read(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, rounds=1)
        await finished(town.run())
        await soon()
        hops = [(e.server, e.path, e.body) for e in town.network.exchanges if "/ng-control/" not in e.path]
        assert [(server, path.removeprefix("/ng-rollout/r")) for server, path, _ in hops] == [
            ("environment", "/run"),
            ("counter", "/seed_session"),
            ("agent", "/v1/agent_sessions"),
            ("agent", "/v1/responses"),
            ("model", "/v1/responses"),
            ("counter", "/add"),
            ("model", "/v1/responses"),
            ("agent", "/v1/agent_sessions/close"),
            ("counter", "/verify"),
            ("counter", "/close_session"),
        ]
        bodies = [body for _, _, body in hops]
        assert _keys(bodies[1]) == ["episode_id", "resources_session_id", "task_data", "task_id"]
        assert _keys(bodies[2]) == ["agent_session_id", "episode_id", "sandbox_access", "task_id", "tool_accesses"]
        (access,) = bodies[2]["tool_accesses"]
        assert access["kind"] == "direct_http"
        assert access["name"] == "counter.direct_http"
        assert access["base_url"] == "http://counter/"
        assert list(access["cookies"]) == ["Counter___counter"]
        assert bodies[3] == {"input": "add up"}
        assert bodies[5] == {"amount": 1}
        assert _keys(bodies[7]) == ["agent_session_id", "episode_id"]
        assert _keys(bodies[8]) == ["response", "responses_create_params", "wanted"]
        assert _keys(bodies[9]) == ["episode_id", "resources_session_id"]

    run_virtual(main())


def test_requests_to_a_server_without_checkpoints_carry_the_prefix_only_where_gyms_do(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, rounds=1, checkpoints=False)
        await finished(town.run())
        await soon()
        prefixed = [e.path for e in town.network.exchanges if e.path.startswith("/ng-rollout/")]
        assert prefixed == ["/ng-rollout/r/v1/responses"] * 3
        assert not [e for e in town.network.exchanges if "/ng-control/" in e.path]

    run_virtual(main())
