"""A deployment that is all Gym, found through its head server: what the head's list of processes makes noticeable."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.interop.mixes import MixedSite, Server, counter_rows, flat, their_agent, their_counters, their_model, worker
from tests.interop.test_mixes import ROLLOUTS, assert_each_once
from tests.process.processes import CommandLine, wait_gone
from tests.process.test_separate_servers import child_of

pytestmark = pytest.mark.interop

SECTIONS = {"agent": "responses_api_agents", "model": "responses_api_models", "resources": "resources_servers"}


class Head:
    """The list that the head server gives."""

    def __init__(self, site: MixedSite, servers: CommandLine) -> None:
        self._file = site.root / "listed.json"
        self._servers = servers
        ready = servers.wait_event("ready")["servers"]
        self.url = next(one["url"] for one in ready if one["instance"] == "head")
        self._listed = [self._line(one) for one in ready if one["kind"] in SECTIONS]
        self._write()

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
        "options": {"listed": str(tmp_path / "listed.json")},
    }
    site = MixedSite(tmp_path).deploy(
        their_agent(participates=False),
        their_model(participates=False),
        their_counters(participates=False),
        worker(latency_s=0.15),
        head_server,
    )
    tasks = site.task_file(flat(counter_rows(ROLLOUTS)))
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
    finally:
        command.close()
        servers.close()
    everything = b"".join(path.read_bytes() for path in site.run_directory.rglob("*") if path.is_file())
    assert b"not-for-your-eyes" not in everything
