"""Sessions of NeMo Gym's stateful servers across a SIGKILL: what follows is what would have followed."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.interop.mixes import COUNTERS, MixedSite, Server, gym_server
from tests.process.deployments import TOKEN
from tests.process.processes import CommandLine, wait_gone
from tests.process.test_separate_servers import child_of

pytestmark = pytest.mark.interop

CONTROL = "/ng-control/v1/checkpoint"
BEARER = {"authorization": f"Bearer {TOKEN['GYMCKPT_CONTROL_TOKEN']}"}


class Rig:
    """One server under `gymckpt serve`, talked to directly."""

    def __init__(self, site: MixedSite, servers: CommandLine) -> None:
        self.directory = site.root / "checkpoint"
        self._servers = servers
        [listed] = servers.wait_event("ready")["servers"]
        self.instance = listed["instance"]
        self.url: str = listed["url"]
        self._client = httpx.Client(base_url=self.url, timeout=30)

    def control(self, operation: str, checkpoint_id: str, **fields: Any) -> dict[str, Any]:
        body = {"checkpoint_id": checkpoint_id, "deadline_ts": time.time() + 30, **fields}
        reply = self._client.post(f"{CONTROL}/{operation}", json=body, headers=BEARER)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def checkpoint(self) -> None:
        assert self.control("prepare", "ckpt-1")["phase"] == "prepared"
        written = self.control("commit", "ckpt-1", checkpoint_dir=str(self.directory), episode_ids=None)
        assert written["episode_ids"] == ["r-1"]
        self.control("resume", "ckpt-1")

    def restore(self) -> None:
        scope = [{"rollout_id": "r-1", "attempt": 0}]
        restored = self.control("restore", "ckpt-2", checkpoint_dir=str(self.directory), episode_ids=scope)
        assert restored["restored"] == ["r-1-a1"]
        self.control("resume", "ckpt-2")

    def post(self, path: str, body: dict[str, Any], key: str = "r-1") -> httpx.Response:
        return self._client.post(f"/ng-rollout/{key}{path}", json=body)

    def ask(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        """A request that carries no session of the cookie's."""
        return httpx.post(self.url + path, json=body, headers=dict(headers), timeout=30)

    def kill(self) -> None:
        """SIGKILL the server; return once another process answers in its place."""
        boot_id = self.status()["boot_id"]
        pid = child_of(self._servers, self.instance)
        os.kill(pid, signal.SIGKILL)
        wait_gone([pid])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if self.status()["boot_id"] != boot_id:
                    return
            except httpx.TransportError:
                continue
        raise AssertionError("the server was not started again")

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get(f"{CONTROL}/status", headers=BEARER).json()
        return found

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def blackjack(tmp_path: Path) -> Iterator[Rig]:
    yield from rig_of(tmp_path, gym_server("server", "resources", "resources_servers/blackjack"))


@pytest.fixture
def counters(tmp_path: Path) -> Iterator[Rig]:
    yield from rig_of(tmp_path, gym_server("server", "resources", COUNTERS))


def rig_of(root: Path, server: Server) -> Iterator[Rig]:
    site = MixedSite(root).deploy(server)
    servers = site.serve()
    rig = Rig(site, servers)
    try:
        yield rig
    finally:
        rig.close()
        servers.close()


def test_a_hand_of_blackjack_is_played_on_with_the_cards_that_would_have_come(blackjack: Rig) -> None:
    assert blackjack.post("/reset", {"responses_create_params": {"input": "Deal me in."}}).status_code == 200
    blackjack.checkpoint()
    undisturbed = [_play(blackjack, "hit", "r-1"), _play(blackjack, "stand", "r-1")]

    blackjack.kill()
    refused = blackjack.post("/step", _action("hit"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "unknown_session")
    blackjack.restore()
    assert [_play(blackjack, "hit", "r-1-a1"), _play(blackjack, "stand", "r-1-a1")] == undisturbed


def test_a_counter_goes_on_from_where_it_stood_and_earns_the_same_reward(counters: Rig) -> None:
    seed = {
        "resources_session_id": "caller-1",
        "episode_id": {"rollout_id": "r-1", "attempt": 0},
        "task_id": {"taskset": "counters", "task_id": "0"},
        "task_data": {"initial_count": 3, "expected_count": 6},
    }
    seeded = counters.post("/seed_session", seed)
    assert seeded.headers["x-ng-checkpoint-verify"] == "replay"
    assert seeded.json()["resources_session_id"] == "caller-1"
    assert counters.post("/increment_counter", {"count": 1}).json() == {"success": True}
    counters.checkpoint()
    counters.post("/increment_counter", {"count": 7})  # this one dies with the process

    counters.kill()
    refused = counters.post("/increment_counter", {"count": 2})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "unknown_session")
    counters.restore()
    assert counters.post("/increment_counter", {"count": 2}, "r-1-a1").json() == {"success": True}
    assert counters.post("/get_counter_value", {}, "r-1-a1").json() == {"count": 6}
    late = counters.post("/increment_counter", {"count": 5}, "r-1")
    assert (late.status_code, late.json()["error"]["code"]) == (409, "stale_attempt")


def _play(table: Rig, action: str, key: str) -> tuple[int, Any]:
    reply = table.post("/step", _action(action), key)
    body = reply.json()
    # A hand that went bust ends with the session: then there is nothing left to stand on.
    return reply.status_code, body if reply.status_code == 200 else body["error"]["code"]


def _action(action: str) -> dict[str, Any]:
    text = {"type": "output_text", "text": f"<action>{action}</action>", "annotations": []}
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
    response = {
        "id": "r",
        "created_at": 0,
        "object": "response",
        "model": "policy",
        "output": [message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    return {"responses_create_params": {"input": "Deal me in."}, "response": response}
