"""Tokens generated twice after a crash, with generation cuts on and off.

    .venv/bin/python scripts/bench/cuts.py [--calls 32] [--tokens-per-second 400]

A policy model server and a scripted worker run as real processes. Calls with answers of 500 to 4,000 tokens are begun,
a checkpoint is taken in the middle, everything is killed with SIGKILL, started again, restored, and the calls are made
again to their end. Twice = generated in both lives, beyond what an undisturbed run needs, of the tokens that were out
at the moment of the checkpoint. Prints one line of JSON for each mode.
"""

import argparse
import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId, new_checkpoint_id
from gymckpt.ports import Deadline, ServerRef, SystemClock
from gymckpt.servers.deployment import Deployment, ServerConfig
from gymckpt.servers.supervisor import Supervisor
from gymckpt.wire.client import HttpTransport, json_object
from gymckpt.wire.control import PREFIX
from gymckpt.wire.gym import rollout_path

TOKEN = SecretStr("a-token-of-this-benchmark")
CLOCK = SystemClock()


def deployment(root: Path, *, cuts: bool, pace: float) -> Deployment:
    """The two servers; the worker keeps its staged prefixes over its death."""
    worker = {"tokens_per_second": pace, "thought_tokens": [500, 4000], "staging_dir": str(root / "staging")}
    model = {"backend": "worker", "ledger_dir": str(root / "ledger"), "generation_cuts": cuts}
    return Deployment(
        servers=(
            ServerConfig(instance="worker", kind="worker", implementation="scripted", options=worker),
            ServerConfig(instance="policy_model", kind="model", implementation="policy_model", options=model),
        )
    )


class Life:
    """The servers from one start to one SIGKILL."""

    def __init__(self, root: Path, *, cuts: bool, pace: float) -> None:
        self._supervisor = Supervisor(deployment(root, cuts=cuts, pace=pace), token=TOKEN, logs=root, restart=False)
        self._transport = HttpTransport(max_connections=10_000)

    async def __aenter__(self) -> "Life":
        await self._supervisor.__aenter__()
        self._servers = {server.instance: server.ref for server in self._supervisor.servers}
        return self

    async def __aexit__(self, *error: object) -> None:
        for instance in self._servers:
            if pid := self._supervisor.pid(instance):
                os.kill(pid, signal.SIGKILL)
        await self._supervisor.__aexit__(None, None, None)
        await self._transport.aclose()

    async def ask(self, episode: EpisodeId, question: str) -> dict[str, Any]:
        """One call, to its end."""
        return await self._post("policy_model", rollout_path(episode, "/v1/responses"), {"input": question})

    async def stats(self) -> dict[str, Any]:
        """The worker's own count."""
        reply = await self._transport.call(self._servers["worker"], "GET", "/stats", deadline=Deadline.after(CLOCK, 10))
        return json_object(reply, "/stats")

    async def control(self, operation: str, checkpoint: str, **fields: Any) -> dict[str, Any]:
        """One control call to the policy model server."""
        body = {"checkpoint_id": checkpoint, "deadline_ts": time.time() + 60, **fields}
        return await self._post("policy_model", f"{PREFIX}/{operation}", body)

    async def _post(self, instance: str, path: str, body: Any) -> dict[str, Any]:
        server: ServerRef = self._servers[instance]
        headers = {"authorization": f"Bearer {TOKEN.get_secret_value()}"}
        reply = await self._transport.call(
            server, "POST", path, body, deadline=Deadline.after(CLOCK, 600), headers=headers
        )
        return json_object(reply, path)


async def measure(root: Path, *, cuts: bool, calls: int, pace: float) -> dict[str, Any]:
    """One crash in the middle of `calls` answers."""
    episodes = [EpisodeId(f"r-{number}") for number in range(calls)]
    scope = [{"rollout_id": episode.rollout_id, "attempt": 0} for episode in episodes]
    directory = root / "checkpoints" / "one"
    directory.mkdir(parents=True)
    async with Life(root, cuts=cuts, pace=pace) as life:
        asking = [asyncio.create_task(life.ask(episode, f"Question {episode.rollout_id}?")) for episode in episodes]
        await asyncio.sleep(800 / pace)
        checkpoint = new_checkpoint_id(1)
        await life.control("prepare", checkpoint)
        begun_s = time.perf_counter()
        committed = await life.control("commit", checkpoint, checkpoint_dir=str(directory), episode_ids=scope)
        commit_s = time.perf_counter() - begun_s
        before = (await life.stats())["generated_tokens"]
        delivered = sum(task.done() for task in asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    async with Life(root, cuts=cuts, pace=0) as life:
        restore = new_checkpoint_id(2)
        await life.control("restore", restore, checkpoint_dir=str(directory), episode_ids=scope)
        await life.control("resume", restore)
        answers = await asyncio.gather(*(life.ask(e.next, f"Question {e.rollout_id}?") for e in episodes))
        after = await life.stats()
    needed = sum(len(answer["token_ids"]) for answer in answers)
    twice = before + after["generated_tokens"] - needed
    return {
        "cuts": cuts,
        "calls": calls,
        "delivered_before": delivered,
        "tokens_needed": needed,
        "tokens_before_the_kill": before,
        "tokens_continued": after["continued_tokens"],
        "tokens_generated_twice": twice,
        "share_generated_twice": round(twice / needed, 4),
        "staging_keys": len(committed["staging_keys"]),
        "commit_s": round(commit_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=32)
    parser.add_argument("--tokens-per-second", type=float, default=400.0)
    options = parser.parse_args()
    for cuts in (True, False):
        with tempfile.TemporaryDirectory() as root:
            result = asyncio.run(measure(Path(root), cuts=cuts, calls=options.calls, pace=options.tokens_per_second))
            print(jsoncodec.dumps(result).decode(), flush=True)


if __name__ == "__main__":
    main()
