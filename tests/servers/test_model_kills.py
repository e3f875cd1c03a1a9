"""Generation cuts over real processes and sockets: SIGKILL of policy model server and worker in mid-answer."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from gymckpt.identity import EpisodeId
from gymckpt.ports import Deadline, SystemClock
from gymckpt.servers.deployment import Deployment, ServerConfig
from gymckpt.servers.supervisor import Supervisor
from gymckpt.wire.client import HttpTransport, json_object
from gymckpt.wire.control import PREFIX
from gymckpt.wire.gym import rollout_path

CLOCK = SystemClock()
TOKEN = "a-token-of-this-test-alone"
EPISODES = [EpisodeId(f"r-{number}") for number in range(4)]
TOKENS_OUT = 100


class Servers:
    """A policy model server and its worker, from their start to their SIGKILL."""

    def __init__(self, root: Path, *, pace: float) -> None:
        worker = {"tokens_per_second": pace, "thought_tokens": [500, 4000], "staging_dir": str(root / "staging")}
        model = {"backend": "worker", "ledger_dir": str(root / "ledger")}
        deployment = Deployment(
            servers=(
                ServerConfig(instance="worker", kind="worker", implementation="scripted", options=worker),
                ServerConfig(instance="policy", kind="model", implementation="policy_model", options=model),
            )
        )
        self._supervisor = Supervisor(deployment, token=SecretStr(TOKEN), logs=root, restart=False)
        self._transport = HttpTransport(max_connections=100)

    async def __aenter__(self) -> "Servers":
        await self._supervisor.__aenter__()
        self._refs = {server.instance: server.ref for server in self._supervisor.servers}
        return self

    async def __aexit__(self, *error: object) -> None:
        for instance in self._refs:
            if pid := self._supervisor.pid(instance):
                os.kill(pid, signal.SIGKILL)
        await self._supervisor.__aexit__(None, None, None)
        await self._transport.aclose()

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        """One exchange with the policy model server."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        deadline = Deadline.after(CLOCK, 60)
        reply = await self._transport.call(self._refs["policy"], "POST", path, body, deadline=deadline, headers=headers)
        return json_object(reply, path)

    async def ask(self, episode: EpisodeId | None, name: str) -> dict[str, Any]:
        """One call, to its end."""
        path = rollout_path(episode, "/v1/responses") if episode else "/v1/responses"
        return await self.post(path, {"input": f"Question {name}?"})

    async def control(self, operation: str, checkpoint: str, **fields: Any) -> dict[str, Any]:
        """One control call."""
        return await self.post(
            f"{PREFIX}/{operation}", {"checkpoint_id": checkpoint, "deadline_ts": time.time() + 60, **fields}
        )

    async def stats(self) -> dict[str, Any]:
        """The worker's own count."""
        deadline = Deadline.after(CLOCK, 60)
        return json_object(
            await self._transport.call(self._refs["worker"], "GET", "/stats", deadline=deadline), "stats"
        )


def test_after_a_sigkill_in_mid_answer_every_token_before_the_cut_is_there_and_none_is_made_twice(
    tmp_path: Path,
) -> None:
    scope = [{"rollout_id": episode.rollout_id, "attempt": 0} for episode in EPISODES]
    directory = tmp_path / "checkpoint"
    directory.mkdir()

    async def first_life() -> int:
        async with Servers(tmp_path, pace=200) as servers:
            asking = [asyncio.create_task(servers.ask(episode, episode.rollout_id)) for episode in EPISODES]
            for _ in range(3000):
                active = (await servers.stats())["active"]
                if len(active) == len(EPISODES) and min(active.values()) >= TOKENS_OUT:
                    break
                await asyncio.sleep(0.01)
            await servers.control("prepare", "ckpt-000001-00000000")
            committed = await servers.control(
                "commit", "ckpt-000001-00000000", checkpoint_dir=str(directory), episode_ids=scope
            )
            assert not any(task.done() for task in asking)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            return len(committed["staging_keys"])

    async def second_life() -> None:
        async with Servers(tmp_path, pace=0) as servers:
            await servers.control("restore", "ckpt-000002-00000000", checkpoint_dir=str(directory), episode_ids=scope)
            await servers.control("resume", "ckpt-000002-00000000")
            answers = await asyncio.gather(*(servers.ask(e.next, e.rollout_id) for e in EPISODES))
            stats = await servers.stats()
            assert stats["continued_tokens"] >= TOKENS_OUT * len(EPISODES)
            total = sum(len(answer["token_ids"]) for answer in answers)
            assert stats["generated_tokens"] + stats["continued_tokens"] == total
            for episode, answer in zip(EPISODES, answers, strict=True):
                undisturbed = await servers.ask(None, episode.rollout_id)
                assert answer["token_ids"] == undisturbed["token_ids"]
                assert answer["log_probs"] == undisturbed["log_probs"]

    assert asyncio.run(first_life()) == len(EPISODES)
    asyncio.run(second_life())
