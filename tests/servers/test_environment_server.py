"""Environment and agent servers over real sockets, as a collector and as Gym's own servers meet them."""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from fastapi import FastAPI
from itsdangerous import TimestampSigner
from pydantic import SecretStr

from gymckpt import jsoncodec
from gymckpt.errors import UsageError
from gymckpt.ports import Deadline, Reply, ServerRef, SystemClock
from gymckpt.servers import agent, environment
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.resources.app import resources_app
from gymckpt.settings import CheckpointSettings
from gymckpt.wire.client import HttpTransport
from tests.roles.town import Counter, Hold, model_app
from tests.servers.loopback import served

ON = CheckpointSettings(enabled=True, control_auth_token=SecretStr("secret"))
TASK = {
    "task_id": {"taskset": "sums", "task_id": "7"},
    "task_input": {"responses_create_params": {"input": "add up"}, "task_data": {"wanted": 2}},
}


class Site:
    """The four servers, running, and a client."""

    def __init__(self, refs: Mapping[str, ServerRef], client: HttpTransport, calls: list[tuple[str, int]]) -> None:
        self.refs = refs
        self.calls = calls
        self._client = client

    async def post(self, server: str, path: str, body: Any, **options: Any) -> Reply:
        deadline = Deadline.after(SystemClock(), 20)
        return await self._client.call(self.refs[server], "POST", path, body, deadline=deadline, **options)


def _on_site(test: Callable[[Site], Awaitable[None]], checkpoint: CheckpointSettings = ON) -> None:
    async def main() -> None:
        calls: list[tuple[str, int]] = []
        hold = Hold()

        def environment_server(refs: Mapping[str, ServerRef]) -> FastAPI:
            options = {"agent": "agent", "tasksets": {"sums": "counter"}}
            return environment.build("environment", options, checkpoint, Neighbours(refs))

        def agent_server(refs: Mapping[str, ServerRef]) -> FastAPI:
            return agent.build("agent", {"model": "model"}, checkpoint, Neighbours(refs))

        builds = {
            "environment": environment_server,
            "agent": agent_server,
            "counter": lambda _: resources_app(Counter(hold, []), checkpoint),
            "model": lambda _: model_app(2, hold, calls),
        }
        async with served(builds) as refs, HttpTransport(max_connections=10) as client:
            await test(Site(refs, client, calls))

    asyncio.run(main())


@pytest.mark.parametrize("checkpoint", [ON, CheckpointSettings()])
def test_a_typed_episode_gets_a_typed_reply_with_and_without_checkpoints(checkpoint: CheckpointSettings) -> None:
    async def test(site: Site) -> None:
        body = {"episode_id": {"rollout_id": "r-7", "attempt": 0}, "task": TASK}
        reply = await site.post("environment", "/run", body)
        assert reply.status == 200
        found = jsoncodec.loads(reply.body)
        assert found["episode_id"] == body["episode_id"]
        assert found["task_id"] == TASK["task_id"]
        assert found["result"]["reward"] == 1.0
        assert [path for path, _ in site.calls] == ["/ng-rollout/r-7/v1/responses"] * 3

    _on_site(test, checkpoint)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 422),
        (b"[1]", 422),
        (b'{"episode_id": {"rollout_id": "../x"}, "task": {}}', 400),
        (b'{"episode_id": {"rollout_id": "x-a1"}, "task": {}}', 400),
        (b'{"episode_id": {"rollout_id": "x"}, "task": {}}', 422),
        (b'{"wanted": 1}', 400),
    ],
)
def test_a_bad_body_gets_one_clear_refusal(body: bytes, status: int) -> None:
    async def test(site: Site) -> None:
        reply = await site.post("environment", "/run", body)
        assert reply.status == status
        assert jsoncodec.loads(reply.body)["error"]["detail"]

    _on_site(test)


def test_the_agents_session_is_a_cookie_signed_with_its_own_name() -> None:
    async def test(site: Site) -> None:
        seed = {
            "agent_session_id": "agent-session-1",
            "episode_id": {"rollout_id": "r", "attempt": 0},
            "task_id": TASK["task_id"],
            "tool_accesses": [],
            "sandbox_access": None,
        }
        reply = await site.post("agent", "/v1/agent_sessions", seed)
        assert jsoncodec.loads(reply.body) == {"agent_session_id": "agent-session-1"}
        name = "SimpleAgent___agent"
        signed = TimestampSigner(name).unsign(reply.cookies[name].encode())
        assert b"agent-session-1" in base64.b64decode(signed)

    _on_site(test)


def test_an_unknown_option_or_a_missing_one_is_named() -> None:
    neighbours = Neighbours({})
    with pytest.raises(UsageError, match=r"environment.*agentt"):
        environment.build("environment", {"agent": "a", "agentt": "b"}, CheckpointSettings(), neighbours)
    with pytest.raises(UsageError, match=r"agent.*model"):
        agent.build("agent", {}, CheckpointSettings(), neighbours)


def test_a_server_that_the_deployment_does_not_have_is_named_at_once() -> None:
    options = {"agent": "agent", "tasksets": {"sums": "counter"}}
    with pytest.raises(UsageError, match="counter"):
        environment.build(
            "environment", options, CheckpointSettings(), Neighbours({"agent": ServerRef("agent", "http://a")})
        )
    with pytest.raises(UsageError, match="policy"):
        agent.build("agent", {"model": "policy"}, CheckpointSettings(), Neighbours({}))
