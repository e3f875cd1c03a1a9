"""A deployment that is all Gym, found through its head server: what the head's list of processes makes noticeable."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.interop.mixes import (
    MixedSite,
    Server,
    counter_rows,
    flat,
    their_agent,
    their_counters,
    their_model,
    their_relay,
    worker,
)
from tests.interop.test_mixes import ROLLOUTS, assert_each_once
from tests.process.processes import CommandLine, wait_gone
from tests.process.test_separate_servers import child_of

pytestmark = pytest.mark.interop

IMPLEMENTATIONS = {
    "environment": "legacy_agent",
    "agent": "simple_agent",
    "model": "openai_model",
    "resources": "example_session_state_mgmt",
}
AGENT = {"type": "responses_api_agents", "name": "agent"}
SECTIONS = {
    "environment": "environment_servers",
    "agent": "responses_api_agents",
    "model": "responses_api_models",
    "resources": "resources_servers",
}


class Head:
    """The list that the head server gives."""

    def __init__(self, site: MixedSite, servers: CommandLine) -> None:
        self._file = site.root / "listed.json"
        self._servers = servers
        ready = servers.wait_event("ready")["servers"]
        self.url = next(one["url"] for one in ready if one["instance"] == "head")
        self._listed = [self._line(one) for one in ready if one["kind"] in SECTIONS]
        self._write()
        configured = {one["instance"]: self._block(one) for one in ready if one["kind"] in SECTIONS}
        secret = {"policy_api_key": "not-for-your-eyes"}
        (site.root / "configuration.yaml").write_text(yaml.safe_dump({**configured, **secret}))

    def _line(self, one: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": one["instance"],
            "process_name": one["instance"],
            "server_type": SECTIONS[one["kind"]],
            "url": one["url"],
            "pid": child_of(self._servers, one["instance"]),
            "start_time": time.time(),
            "status": "success",
        }

    def _block(self, one: dict[str, Any]) -> dict[str, Any]:
        port = int(one["url"].rpartition(":")[2])
        implementation: dict[str, Any] = {"host": "127.0.0.1", "port": port, "entrypoint": "app.py"}
        if one["kind"] == "environment":
            implementation["agent_server"] = AGENT
        return {SECTIONS[one["kind"]]: {IMPLEMENTATIONS[one["kind"]]: implementation}}

    def kill(self, instance: str) -> None:
        """SIGKILL; the list says so before, and tells of the new process once there is one."""
        [line] = [line for line in self._listed if line["name"] == instance]
        pid, line["pid"] = line["pid"], 0
        self._write()
        os.kill(pid, signal.SIGKILL)
        wait_gone([pid])
        deadline = time.monotonic() + 90
        while line["pid"] == 0:
            assert time.monotonic() < deadline
            try:
                line["pid"] = child_of(self._servers, instance)
            except (AssertionError, OSError):
                continue
        line["start_time"] = time.time()
        self._write()

    def _write(self) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(self._listed))
        fresh.replace(self._file)


def test_a_process_that_was_replaced_under_an_episode_makes_it_void(tmp_path: Path) -> None:
    head_server: Server = {
        "instance": "head",
        "kind": "worker",
        "implementation": "tests.interop.head:build",
        "options": {
            "listed": str(tmp_path / "listed.json"),
            "configuration": str(tmp_path / "configuration.yaml"),
        },
    }
    site = MixedSite(tmp_path).deploy(
        their_relay(),
        their_agent(participates=False),
        their_model(participates=False),
        their_counters(participates=False),
        worker(latency_s=0.15),
        head_server,
    )
    rows = flat(counter_rows(ROLLOUTS))
    tasks = site.task_file(rows)
    servers = site.serve()
    head = Head(site, servers)
    command = CommandLine(
        "collect",
        *(tasks, "--gym-head", head.url, "--run-dir", str(site.run_directory), "--concurrency", "4", "--json"),
        log=site.root / "collect.log",
    )
    try:
        command.wait_event("outcome")
        head.kill("counters")
        assert command.finish() == 0, command.describe()
        noted = [str(event.get("text")) for event in command.events if event["event"] == "note"]
        assert any("started again: counters" in text for text in noted), command.describe()
        assert_each_once(site)
        gym_reads(site, rows, head)
    finally:
        command.close()
        servers.close()
    everything = b"".join(path.read_bytes() for path in site.run_directory.rglob("*") if path.is_file())
    assert b"not-for-your-eyes" not in everything


def gym_reads(site: MixedSite, rows: list[dict[str, Any]], head: Head) -> None:
    """`gym eval aggregate` and `gym eval profile` read the rows that were written."""
    inputs = site.root / "inputs.jsonl"
    stamped = [{**row, "_ng_task_index": number, "_ng_rollout_index": 0} for number, row in enumerate(rows)]
    inputs.write_text("".join(json.dumps(row) + "\n" for row in stamped))
    rollouts = str(site.run_directory / "rollouts.jsonl")
    merged = site.root / "merged" / "rollouts.jsonl"
    port = head.url.rpartition(":")[2]
    address = ("++head_server.host=127.0.0.1", f"++head_server.port={port}")
    _gym(site, "eval", "aggregate", "-i", rollouts, "-o", str(merged), "--no-health-check", *address)
    assert len(merged.read_text().splitlines()) == ROLLOUTS
    [metrics] = json.loads((merged.parent / "rollouts_aggregate_metrics.json").read_text())
    assert metrics["agent_metrics"]["mean/reward"] == 1.0
    printed = _gym(site, "eval", "profile", "--inputs", str(inputs), "--rollouts", rollouts)
    assert f"{ROLLOUTS}/{ROLLOUTS} rollout rows (100.00%)" in printed


def _gym(site: MixedSite, *arguments: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("gym")), *arguments],
        cwd=site.root,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"gym {' '.join(arguments)}\n{done.stdout[-3000:]}\n{done.stderr[-1000:]}")
    return done.stdout
