"""SIGTERM, restarts and judges: what a checkpoint never waits for, and what a stop leaves behind."""

import contextlib
import os
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.process.deployments import Site
from tests.process.history import outcomes
from tests.process.processes import GYMCKPT, CommandLine, descendants, wait_gone

SPARE_S = 4.0
"""For a busy machine to end processes; any wait of the product's own beyond the grace is longer."""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def checkpoints(command: CommandLine) -> list[dict[str, Any]]:
    return [event for event in command.events if event["event"] == "checkpoint"]


def steps(site: Site) -> list[str]:
    return [episode["boundary"]["step"] for episode in site.inspect()["episodes"] if episode["boundary"]]


def test_sigterm_takes_a_checkpoint_prints_the_command_that_resumes_and_exits_75(site: Site) -> None:
    site.prepare()
    command = site.collect("@workbench", "--limit", "30", "--checkpoint-every", "off", "--concurrency", "16")
    resumed = None
    try:
        command.wait_event("outcome")
        command.process.send_signal(signal.SIGTERM)
        assert command.finish(60) == 75, command.describe()
        assert len(checkpoints(command)) == 1
        assert command.events[-1]["unresolved"] > 0
        printed = next(line for line in command.log.read_text().splitlines() if "gymckpt restore" in line)
        words = shlex.split(printed[printed.index("gymckpt restore") :])
        assert words[0] == "gymckpt"
        resumed = CommandLine(*words[1:], "--json", log=site.root / "resumed.log")
        assert resumed.wait_event("restored")["episodes"] > 0
        assert resumed.finish() == 0, resumed.describe()
        assert len(outcomes(site.rows())) == 30
    finally:
        command.close()
        if resumed is not None:
            resumed.close()
    assert GYMCKPT


def test_servers_that_all_hang_keep_a_stopped_collector_no_longer_than_the_grace(site: Site) -> None:
    site.prepare()
    arguments = ("--limit", "30", "--checkpoint-every", "1s", "--concurrency", "16", "--grace", "8s")
    command = site.collect("@workbench", *arguments)
    servers: list[int] = []
    try:
        command.wait_event("checkpoint")
        servers = descendants(command.process.pid)[1:]
        for pid in servers:
            os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        command.process.send_signal(signal.SIGTERM)
        assert command.finish(60) == 75, command.describe()
        assert time.monotonic() - stopped_s < 8.0 + SPARE_S
        wait_gone(servers, timeout_s=5.0)
    finally:
        for pid in servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        command.close()


def test_shell_episodes_never_delay_a_checkpoint_and_start_over_after_a_crash(site: Site) -> None:
    site.prepare()
    command = site.collect(
        "@mixed", "--limit", "40", "--checkpoint-every", "500ms", "--keep", "1000", "--concurrency", "20"
    )
    resumed = None
    try:
        with_restarts = command.wait_event("checkpoint", lambda event: event["restarts"] > 3)
        shown = site.inspect("--checkpoint", with_restarts["checkpoint_id"])
        restarts = [episode for episode in shown["episodes"] if episode["restart"] is not None]
        reasons = {episode["restart"] for episode in restarts}
        assert "cannot_capture:shell" in reasons
        assert reasons <= {"cannot_capture:shell", "no_boundary"}  # the latter had only just begun
        command.kill_everything()
        resumed = site.restore()
        assert resumed.finish() == 0, resumed.describe()
        assert len(outcomes(site.rows())) == 40
        assert not [event for event in command.events if event["event"] == "checkpoint_failed"]
    finally:
        command.close()
        if resumed is not None:
            resumed.close()


def test_shell_episodes_run_on_when_nothing_crashes(site: Site) -> None:
    site.prepare()
    command = site.collect("@shell", "--limit", "8", "--checkpoint-every", "200ms")
    try:
        assert command.finish() == 0, command.describe()
        assert {row["_ng_attempt_index"] for row in site.rows()} == {0}
    finally:
        command.close()


def test_a_checkpoint_is_published_while_a_judge_is_still_at_work(site: Site) -> None:
    site.prepare(judged={"judge_delay_s": 3600})
    command = site.collect("@judged", "--limit", "4", "--checkpoint-every", "500ms", "--keep", "1000")
    try:
        command.wait_checkpoint(lambda: steps(site) == ["verify"] * 4)
        assert not [event for event in command.events if event["event"] == "outcome"]
    finally:
        command.close()
