"""Many kills in one run: of everything, of the collector, of a server, of a resume in the middle of its work. Whatever
died when, each look finds the accounts whole, and the end is that of a run that nobody touched."""

import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli.terminal import inline
from tests.process.deployments import Site
from tests.process.history import History, outcomes
from tests.process.processes import CommandLine, descendants, wait_gone
from tests.process.test_main_proof import history_of

SEED = 20261130
REPEATS = 4
LATENCY_S = 0.3
"""So slow that the run lasts longer than all the kills."""
CALLS_BYTES = 3000
"""How far the audit log may grow between a checkpoint and a kill: some thirty calls."""


def arguments(rollouts: int) -> tuple[str, ...]:
    tasks = ("@workbench", "--limit", str(rollouts // REPEATS), "--repeats", str(REPEATS))
    return (*tasks, "--checkpoint-every", "1s", "--concurrency", "20")


@dataclass
class Undisturbed:
    """What a run that nobody touched gave."""

    outcomes: dict[tuple[int, int], Any]
    metrics: dict[str, Any]


def said(*arguments: str) -> dict[str, Any]:
    """What a reading verb says, in this process: starting one for each look would take longer than the run."""
    done = inline(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def metrics_of(site: Site) -> dict[str, Any]:
    """All that a report says of the samples; attempts are no part of that."""
    report = said("report", str(site.run_directory), "--tasks")
    return {name: report[name] for name in ("counts", "whole", "by_agent", "failures", "tasks")}


def collect_undisturbed(site: Site, rollouts: int) -> Undisturbed:
    command = site.collect(*arguments(rollouts))
    try:
        assert command.finish(600.0) == 0, command.describe()
    finally:
        command.close()
    return Undisturbed(outcomes(site.rows()), metrics_of(site))


@dataclass
class Campaign:
    """One run and the kills it goes through."""

    site: Site
    rollouts: int
    dice: random.Random
    history: History = field(init=False)
    command: CommandLine = field(init=False)
    kills: Counter[str] = field(default_factory=Counter)
    settled: dict[str, Any] = field(default_factory=dict)
    """Every outcome ever announced, by rollout."""

    def __post_init__(self) -> None:
        self.history = history_of(self.site)
        self.command = self.site.collect(*arguments(self.rollouts))

    def kill(self, how: str) -> bool:
        """One kill at a drawn moment; False if the run ended before."""
        if not self.command.wait_checkpoint(lambda: True):
            return False
        if not self._let_calls_pass(self.dice.randrange(CALLS_BYTES)):
            return False
        getattr(self, f"_kill_{how}")()
        self.kills[how] += 1
        return True

    def _let_calls_pass(self, size: int) -> bool:
        audit = self.site.audit("policy_model")
        until = audit.stat().st_size + size
        self.command.wait_until(lambda: audit.stat().st_size >= until or self.command.done)
        return not self.command.done

    def _kill_everything(self) -> None:
        self.command.kill_everything()
        self._go_on()

    def _kill_collector(self) -> None:
        servers = descendants(self.command.process.pid)[1:]
        self.command.kill_alone()
        # Its servers notice by themselves: nothing of a dead run may outlive it and block the next start.
        wait_gone(servers, timeout_s=30.0)
        self._go_on()

    def _kill_server(self) -> None:
        """One server dies and comes back empty under a collector that goes on."""
        seen = sum(event["event"] == "server_restarted" for event in self.command.events)
        self.history.deaths.append(time.time())
        os.kill(self.dice.choice(participants(self.command.process.pid)), signal.SIGKILL)
        self.command.wait_until(
            lambda: (
                self.command.done or sum(event["event"] == "server_restarted" for event in self.command.events) > seen
            )
        )

    def _kill_resume(self) -> None:
        """Everything dies, then the resume at a step of it, then the resume of the resume."""
        self.command.kill_everything()
        for _ in range(2):
            self._go_on()
            self._let_journals_grow(self.dice.randrange(1, 4000))
            self.command.kill_everything()
        self._go_on()

    def _let_journals_grow(self, size: int) -> None:
        journal = self.site.run_directory / "journal"
        until = _size(journal) + size
        self.command.wait_until(lambda: _size(journal) >= until or self.command.done)

    def _go_on(self) -> None:
        self.look()
        self.command.close()
        self.command = self.site.restore()

    def look(self) -> None:
        """The accounts as a reader finds them, whatever happens meanwhile."""
        self.history.observe()
        for event in self.command.events:
            if event["event"] == "outcome":
                known = self.settled.setdefault(event["rollout_id"], event)
                assert known == event, f"a second outcome: {known}, {event}"
        found = said("inspect", str(self.site.run_directory), "--limit", "1")
        assert found["planned"] == self.rollouts
        assert found["planned"] == found["succeeded"] + found["failed"] + found["omitted"] + found["unresolved"]
        assert found["succeeded"] + found["failed"] >= len(self.settled), "an announced outcome was lost"

    def finish(self) -> None:
        assert self.command.finish(600.0) == 0, self.command.describe()
        self.look()
        done = self.command.events[-1]
        assert (done["planned"], done["succeeded"], done["unresolved"]) == (self.rollouts, self.rollouts, 0), done


def participants(pid: int) -> list[int]:
    """The server processes below `pid`, but for the worker: its outage is the model's to tell of, and no restart."""
    return [child for child in descendants(pid)[1:] if "worker" not in Path(f"/proc/{child}/fd/2").readlink().name]


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def prove(root: Path, rollouts: int, kills: list[str]) -> None:
    undisturbed = collect_undisturbed(Site(root / "undisturbed", latency_s=0.0).prepare(), rollouts)
    campaign = Campaign(
        Site(root / "killed", latency_s=LATENCY_S).prepare(), rollouts, random.Random(SEED + len(kills))
    )
    try:
        for how in kills:
            assert campaign.kill(how), f"the run ended after {campaign.kills}: {campaign.command.describe()}"
            campaign.look()
        campaign.finish()
    finally:
        campaign.command.close()
    assert outcomes(campaign.site.rows()) == undisturbed.outcomes
    assert metrics_of(campaign.site) == undisturbed.metrics
    assert campaign.history.check() > 0


@pytest.mark.timeout(400)
def test_kills_of_collector_servers_and_resumes_change_nothing(tmp_path: Path) -> None:
    prove(tmp_path, 40, ["everything", "server", "collector", "resume"])


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fifty_kills_of_collector_servers_and_resumes_change_nothing(tmp_path: Path) -> None:
    kinds = ["everything", "collector", "server", "resume"]
    drawn = random.Random(SEED)
    prove(tmp_path, 500, [drawn.choice(kinds) for _ in range(50)])
