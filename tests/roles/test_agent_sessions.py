"""Agent sessions and activations: indexes, stored replies, admission, retirement."""

import asyncio
from pathlib import Path
from typing import Any

from gymckpt.identity import EpisodeId
from gymckpt.ports import Reply
from gymckpt.roles.agent_session import AgentSession
from tests.roles.town import ORDER, Town, finished, json_of, soon
from tests.simulation.clock import run_virtual

R = EpisodeId("r")


class Caller:
    """An environment server of a few lines."""

    def __init__(self, town: Town, attempt: int = 0) -> None:
        self.town = town
        self.reference = {"rollout_id": "r", "attempt": attempt}
        self.prefix = f"/ng-rollout/{EpisodeId('r', attempt).capture_key}"
        self.cookies: dict[str, str] = {}

    async def seed_tools(self) -> dict[str, str]:
        body = {"resources_session_id": "rs", "episode_id": self.reference}
        seed = {**body, "task_id": {"taskset": "sums", "task_id": "1"}, "task_data": {}}
        return dict((await self.town.post("counter", f"{self.prefix}/seed_session", seed)).cookies)

    def seed(self, key: str = "s", tools: dict[str, str] | None = None, **access: Any) -> "asyncio.Task[Reply]":
        named = {"kind": "direct_http", "name": "counter.direct_http", "base_url": "http://counter/", **access}
        body = {
            "agent_session_id": key,
            "episode_id": self.reference,
            "task_id": {"taskset": "sums", "task_id": "1"},
            "tool_accesses": [{**named, "cookies": tools or {}}],
        }
        return self.town.post("agent", "/v1/agent_sessions", body)

    async def seeded(self) -> None:
        tools = await self.seed_tools()
        self.cookies = dict((await self.seed(tools=tools)).cookies)

    def activate(self, index: int | None = 1, **params: Any) -> "asyncio.Task[Reply]":
        headers = {} if index is None else {"x-ng-agent-activation": str(index)}
        body = {"input": "add up", **params}
        path = f"{self.prefix}/v1/responses"
        return self.town.post("agent", path, body, headers=headers, cookies=self.cookies)

    def close(self, key: str = "s") -> "asyncio.Task[Reply]":
        body = {"agent_session_id": key, "episode_id": self.reference}
        return self.town.post("agent", "/v1/agent_sessions/close", body)


def _code(reply: Reply) -> str:
    code: str = json_of(reply)["error"]["code"]
    return code


def test_the_last_completed_activation_gives_its_stored_reply_and_the_next_one_runs(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, rounds=1)
        caller = Caller(town)
        await caller.seeded()
        first = await finished(caller.activate(1))
        calls = len(town.calls)
        assert await finished(caller.activate(1)) == first
        assert len(town.calls) == calls, "nothing ran again"
        for index in (0, 3):
            assert _code(await caller.activate(index)) == "activation_out_of_order"
        second = await caller.activate(2, input=[{"role": "user", "content": "more"}])
        assert second.status == 200
        assert second.headers["x-gymckpt-turns"] == "4"
        assert len(town.calls) == calls + 2

    run_virtual(main())


def test_a_caller_may_count_its_activations_from_zero_or_not_at_all(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, rounds=0)
        caller = Caller(town)
        await caller.seeded()
        for index in (0, 0, 1, None):
            assert (await caller.activate(index)).status == 200
        assert len(town.calls) == 3
        assert _code(await caller.activate(1)) == "activation_out_of_order"

    run_virtual(main())


def test_a_stored_reply_and_the_second_activation_survive_a_restore(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, rounds=1)
        caller = Caller(town)
        await caller.seeded()
        first = await finished(caller.activate(1))
        checkpoint_id, committed = await town.checkpoint()
        assert committed["agent"]["needs_by_episode"] == {"r": []}
        await town.kill(*ORDER)
        for server in ORDER:
            town.start(server)
        for server in ("agent", "counter"):
            directory = town.directory(checkpoint_id)
            named = [{"rollout_id": "r", "attempt": 0}]
            await town.control(
                server, "restore", checkpoint_id="restore-1", checkpoint_dir=directory, episode_ids=named
            )
        for server in ("counter", "agent"):
            await town.control(server, "resume", checkpoint_id="restore-1")
        replacement = Caller(town, 1)
        replacement.cookies = caller.cookies
        calls = len(town.calls)
        assert await finished(replacement.activate(1)) == first
        assert len(town.calls) == calls
        assert (await replacement.activate(2)).status == 200
        assert town.calls[-1][0] == "/ng-rollout/r-a1/v1/responses"

    run_virtual(main())


def test_an_activation_that_failed_may_be_sent_again_and_goes_on_from_its_last_boundary(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        caller = Caller(town)
        await caller.seeded()
        town.hold.at(("model", 2))
        running = caller.activate(1)
        await town.hold.reached[("model", 2)].wait()
        town.network.take_down(town.servers["model"])
        failed = await running
        assert (failed.status, _code(failed)) == (502, "server_error")
        town.hold.let_go(("model", 2))
        town.start("model")
        before = len(town.calls)
        assert (await caller.activate(1)).status == 200
        assert [seen for _, seen in town.calls[before:]] == [2, 3]

    run_virtual(main())


def test_a_second_activation_cannot_start_beside_a_running_one(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        caller = Caller(town)
        await caller.seeded()
        town.hold.at(("model", 0))
        caller.activate(1)
        await town.hold.reached[("model", 0)].wait()
        assert _code(await caller.activate(1)) == "activation_out_of_order"

    run_virtual(main())


def test_seeds_that_arrive_while_closed_wait(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        caller = Caller(town)
        tools = await caller.seed_tools()
        checkpoint_id = town.next_id()
        assert await town.prepare(checkpoint_id)
        waiting = caller.seed(tools=tools)
        await soon()
        assert not waiting.done()
        committed = await town.commit(checkpoint_id)
        assert committed["agent"]["episode_ids"] == []
        await town.resume(checkpoint_id)
        assert (await waiting).status == 200

    run_virtual(main())


class SlowConnection:
    """An agent that needs time to make a seeded session usable."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, session: AgentSession) -> None:
        self.begun.set()
        await self.go.wait()


def test_a_seed_in_progress_blocks_and_is_then_exported(tmp_path: Path) -> None:
    async def main() -> None:
        slow = SlowConnection()
        town = Town(tmp_path, connect=slow)
        caller = Caller(town)
        seeding = caller.seed(tools=await caller.seed_tools())
        await slow.begun.wait()
        checkpoint_id = town.next_id()
        assert await town.prepare(checkpoint_id, ("environment",))
        assert not await town.prepare(checkpoint_id, ("agent",), within_s=5)
        slow.go.set()
        assert (await seeding).status == 200
        assert await town.prepare(checkpoint_id)
        assert (await town.commit(checkpoint_id))["agent"]["episode_ids"] == ["r"]

    run_virtual(main())


def test_a_retire_waits_for_a_seed_and_frees_what_it_built(tmp_path: Path) -> None:
    async def main() -> None:
        slow = SlowConnection()
        town = Town(tmp_path, connect=slow)
        caller = Caller(town)
        seeding = caller.seed(tools=await caller.seed_tools())
        await slow.begun.wait()
        retiring = asyncio.create_task(town.retire(R, servers=("agent",)))
        await soon()
        assert not retiring.done()
        slow.go.set()
        await retiring
        assert _code(await seeding) == "stale_attempt"
        assert list(town.roles["agent"].sessions) == []
        assert town.roles["agent"].live() == []

    run_virtual(main())


def test_a_retire_cancels_an_activation_and_fences_the_attempt(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        caller = Caller(town)
        await caller.seeded()
        town.hold.at(("model", 1))
        running = caller.activate(1)
        await town.hold.reached[("model", 1)].wait()
        await town.retire(R, servers=("agent",))
        assert _code(await running) == "stale_attempt"
        assert _code(await caller.activate(1)) == "stale_attempt"
        assert _code(await caller.seed("another")) == "stale_attempt"
        assert _code(await caller.close()) == "stale_attempt"

    run_virtual(main())


def test_an_unknown_session_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        caller = Caller(town)
        await caller.seeded()
        await town.kill("agent")
        town.start("agent")
        assert _code(await caller.activate(1)) == "unknown_session"
        assert _code(await caller.close()) == "unknown_session"

    run_virtual(main())


def test_a_new_session_of_an_episode_frees_the_old_one_and_the_same_one_stays(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        caller = Caller(town)
        tools = await caller.seed_tools()
        for key in ("s", "s", "t"):
            assert (await caller.seed(key, tools)).status == 200
        assert [session.key for session in town.roles["agent"].sessions] == ["t"]
        later = Caller(town, 1)
        assert (await later.seed("u", tools)).status == 200
        assert _code(await caller.seed("v", tools)) == "stale_attempt"
        assert _code(await caller.seed("u", tools)) == "checkpoint_conflict"

    run_virtual(main())


def test_close_gives_the_tools_cookies_back(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, rounds=1)
        caller = Caller(town)
        await caller.seeded()
        await finished(caller.activate(1))
        closed = await finished(caller.close())
        assert list(closed["resources_cookies"]) == ["Counter___counter"]
        assert closed["agent_observations"] is None

    run_virtual(main())


def test_an_agent_that_captures_nothing_never_closes_and_never_blocks(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, agent={"capture_sessions": False})
        town.hold.at(("add", 1))
        running = town.run()
        await town.hold.reached[("add", 1)].wait()
        checkpoint_id = town.next_id()
        assert await town.prepare(checkpoint_id, ("environment", "agent"))
        status = json_of(await town.ask("agent", "status"))
        assert (status["accepting"], status["report"]["restarts"]) == (True, ["r"])
        committed = await town.control(
            "agent",
            "commit",
            checkpoint_id=checkpoint_id,
            checkpoint_dir=town.directory(checkpoint_id),
            episode_ids=None,
        )
        assert committed["episode_ids"] == []
        assert json_of(await town.ask("environment", "status"))["report"]["restarts"] == ["r"]
        for server in ("agent", "environment"):
            await town.control(server, "resume", checkpoint_id=checkpoint_id)
        town.hold.let_go(("add", 1))
        assert (await finished(running))["result"]["reward"] == 1.0

    run_virtual(main())


def test_a_session_whose_tools_are_not_in_our_configuration_is_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        caller = Caller(town)
        reply = await caller.seed(name="elsewhere.direct_http", base_url="http://counter/")
        assert reply.headers["x-ng-checkpoint-restart"] == "1"
        assert json_of(await town.ask("agent", "status"))["report"]["restarts"] == ["r"]
        secret = await caller.seed("t", headers={"authorization": "Bearer x"})
        assert secret.headers["x-ng-checkpoint-restart"] == "1", "a token would not be in the record"

    run_virtual(main())


def test_records_hold_neither_addresses_nor_tokens(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 2))
        town.run()
        await town.hold.reached[("model", 2)].wait()
        for server in ("environment", "agent"):
            async for record in town.roles[server].export(None):
                text = str(record.record)
                assert "http://" not in text
                assert "Bearer" not in text

    run_virtual(main())
