"""Servers that outlive their collector: leases free them, recovery empties them, restarted ones are noticed."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.process.deployments import TOKEN, Site, addresses
from tests.process.history import History, outcomes
from tests.process.processes import CommandLine, descendants, run
from tests.process.test_main_proof import AUDITED, Reference, history_of, undisturbed

__all__ = ["undisturbed"]

ROLLOUTS = 30
TASKS = ("@workbench", "--limit", str(ROLLOUTS))
COLLECT = (*TASKS, "--checkpoint-every", "1s", "--concurrency", "20")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path).prepare()


def check_finished(command: CommandLine, site: Site, history: History, reference: Reference) -> None:
    history.observe()
    assert command.finish() == 0, command.describe()
    done = command.events[-1]
    assert (done["planned"], done["succeeded"], done["unresolved"]) == (ROLLOUTS, ROLLOUTS, 0), command.describe()
    expected = {(task, repeat): row for (task, repeat), row in reference.outcomes.items() if task < ROLLOUTS}
    assert outcomes(site.rows()) == expected
    history.observe()
    history.check()


def child_of(servers: CommandLine, instance: str) -> int:
    """The process that serves `instance`, found by the port it was given."""
    listed = servers.wait_event("ready")["servers"]
    port = next(int(s["url"].rpartition(":")[2]) for s in listed if s["instance"] == instance)
    listening = _listening(port)
    for pid in descendants(servers.process.pid)[1:]:
        held = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
        if held & listening:
            return pid
    raise AssertionError(f"nobody listens for {instance}")


def _listening(port: int) -> set[str]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if int(row[1].rpartition(":")[2], 16) == port and row[3] == "0A"}


def test_after_the_collector_alone_died_its_episodes_go_on_in_the_same_servers(
    site: Site, undisturbed: Reference
) -> None:
    servers = site.serve("--lease", "5")
    history = history_of(site)
    command = site.collect_from(servers, *COLLECT)
    resumed = None
    try:
        assert command.wait_checkpoint(history.far_enough)
        command.kill_alone()
        history.observe()
        resumed = site.restore(*addresses(servers), environment=TOKEN)
        restored = resumed.wait_event("restored")
        assert restored["episodes"] > 0
        check_finished(resumed, site, history, undisturbed)
    finally:
        for started in (command, resumed, servers):
            if started is not None:
                started.close()


@pytest.mark.parametrize(
    "instance",
    [
        "workbench",
        "policy_model",
        pytest.param("agent", marks=pytest.mark.slow),
        pytest.param("environment", marks=pytest.mark.slow),
    ],
)
def test_a_server_killed_and_started_again_empty_never_gives_a_wrong_reward(
    site: Site, undisturbed: Reference, instance: str
) -> None:
    servers = site.serve()
    history = history_of(site)
    command = site.collect_from(servers, *COLLECT)
    try:
        assert command.wait_checkpoint(history.far_enough)
        history.observe()
        os.kill(child_of(servers, instance), signal.SIGKILL)
        check_finished(command, site, history, undisturbed)
    finally:
        command.close()
        servers.close()


def test_a_collector_that_slept_past_its_lease_stops_itself_when_another_took_over(
    site: Site, undisturbed: Reference
) -> None:
    servers = site.serve("--lease", "5")
    history = history_of(site)
    first = site.collect_from(servers, *COLLECT)
    second = None
    try:
        assert first.wait_checkpoint(history.far_enough)
        os.kill(first.process.pid, signal.SIGSTOP)
        history.observe()
        second = site.restore("--steal-lock", *addresses(servers), environment=TOKEN)
        second.wait_event("restored")
        os.kill(first.process.pid, signal.SIGCONT)
        assert first.finish() == 3, first.describe()
        check_finished(second, site, history, undisturbed)
    finally:
        for started in (first, second, servers):
            if started is not None:
                started.close()


def test_a_second_collector_on_the_same_directory_is_refused(site: Site) -> None:
    servers = site.serve()
    first = site.collect_from(servers, *COLLECT)
    second = None
    try:
        first.wait_event("outcome")
        second = site.restore(*addresses(servers), environment=TOKEN)
        assert second.finish() == 3
        assert "held by" in second.log.read_text() or "holds" in second.log.read_text()
    finally:
        for started in (first, second, servers):
            if started is not None:
                started.close()


def test_status_shows_every_server(site: Site) -> None:
    servers = site.serve()
    try:
        shown = run("status", *addresses(servers), "--json", environment=TOKEN)
        assert {server["phase"] for server in shown["servers"]} == {"idle"}
    finally:
        servers.close()


def test_sigterm_to_serve_ends_every_server(site: Site) -> None:
    servers = site.serve()
    everyone = descendants(servers.process.pid)
    try:
        servers.process.terminate()
        assert servers.finish() == 0
        assert [pid for pid in everyone if Path(f"/proc/{pid}").exists()] == []
    finally:
        servers.close()


def test_the_audit_log_is_json_lines(site: Site) -> None:
    servers = site.serve()
    command = site.collect_from(servers, "@workbench", "--limit", "2")
    try:
        assert command.finish() == 0, command.describe()
        for name in AUDITED:
            lines = site.audit(name).read_bytes().splitlines()
            assert lines
            assert {"t", "server", "rollout_id", "attempt", "call"} <= set(json.loads(lines[0]))
    finally:
        command.close()
        servers.close()
