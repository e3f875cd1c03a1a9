"""Crash points in real processes: SIGKILL to one process at a named place, then one command goes on with the run.

A cell names the place, the process that dies there and the passage at which it does. `run`: in the first collection;
`resume`: everything was killed before, at a published checkpoint, and the place lies in what restores it.
"""

import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from gymckpt.crashpoints import COLLECTOR, ENVIRONMENT_VARIABLE, ENVIRONMENT_VARIABLE_IN
from tests.process.deployments import Site
from tests.process.history import History, outcomes
from tests.process.processes import CommandLine

ROLLOUTS = 8
AUDITED = ("workbench", "policy_model")
# Every checkpoint is kept, so that the checker can read the one that a resume used; tokens come late enough for two.
COLLECT = ("@workbench", "--limit", str(ROLLOUTS), "--checkpoint-every", "0.4s", "--keep", "99", "--concurrency", "8")
LATENCY_S = 0.15


@dataclass(frozen=True)
class Cell:
    """Where who dies, and when."""

    point: str
    dies: str = COLLECTOR
    passage: int = 1
    phase: Literal["run", "resume"] = "run"
    run_exists: bool = True
    """Whether there is a run afterwards; if not, the same collect command begins it."""

    def __str__(self) -> str:
        return f"{self.point}-{self.dies}-{self.phase}"

    @property
    def environment(self) -> dict[str, str]:
        return {ENVIRONMENT_VARIABLE: f"{self.point}:kill:{self.passage}", ENVIRONMENT_VARIABLE_IN: self.dies}


QUICK = [
    Cell("collector.create.before_run_json", run_exists=False),
    Cell("prepare.after_close", "agent", passage=2),
    Cell("commit.segment.before_link", "workbench", passage=2),
    Cell("commit.manifest.before_link", "policy_model", passage=2),
    Cell("publish.checkpoint.before_link", passage=2),
    Cell("resume.before_open", "environment", passage=2),
    Cell("collector.restore.sent", phase="resume"),
    Cell("restore.before_install", "workbench", phase="resume"),
]
SLOW = [
    Cell("collector.create.before_plan", run_exists=False),
    Cell("collector.create.after_run_json"),
    Cell("collector.dispatch.after_journal", passage=4),
    Cell("collector.outcome.after_journal", passage=2),
    Cell("journal.before_fsync", passage=12),
    Cell("collector.prepare.done", passage=2),
    Cell("collector.commit.sent", passage=2),
    Cell("publish.collection.before_link", passage=2),
    Cell("publish.checkpoint.after_link", passage=2),
    Cell("publish.latest.before_replace", passage=2),
    Cell("collector.resume.before", passage=2),
    Cell("commit.before_export", "environment", passage=2),
    Cell("commit.index.before_link", "environment", passage=2),
    Cell("commit.after_manifest", "agent", passage=2),
    Cell("ledger.append.before_fsync", "policy_model", passage=40),
    Cell("retire.after_mark", "environment"),
    Cell("collector.resume.after_epoch", phase="resume"),
    Cell("collector.restore.intended", phase="resume"),
    Cell("collector.restore.retired", phase="resume"),
    Cell("collector.restore.resumed", phase="resume"),
    Cell("restore.after_validate", "agent", phase="resume"),
    Cell("restore.after_install", "policy_model", phase="resume"),
    Cell("resume.after_open", "environment", phase="resume"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Any]:
    site = Site(tmp_path_factory.mktemp("undisturbed")).prepare()
    command = site.collect("@workbench", "--limit", str(ROLLOUTS))
    try:
        assert command.finish() == 0, command.describe()
    finally:
        command.close()
    return outcomes(site.rows())


class Played:
    """One cell under way; every command that it started ends with it."""

    def __init__(self, cell: Cell, root: Path) -> None:
        self.cell = cell
        self.site = Site(root, latency_s=LATENCY_S).prepare()
        self.history = History(self.site.run_directory, {name: self.site.audit(name) for name in AUDITED})
        self.commands: list[CommandLine] = []

    def started(self, command: CommandLine) -> CommandLine:
        self.commands.append(command)
        return command

    def collect(self, **environment: str) -> CommandLine:
        return self.started(self.site.collect(*COLLECT, environment=environment))

    def die(self) -> None:
        """Come to the crash point, and see that it was reached: by exit code, or by the supervisor's word."""
        if self.cell.phase == "run":
            command = self.collect(**self.cell.environment)
        else:
            before = self.collect()
            assert before.wait_checkpoint(lambda: True), before.describe()
            before.kill_everything()
            self.history.observe()
            command = self.started(self.site.restore(environment=self.cell.environment))
        if self.cell.dies == COLLECTOR:
            assert command.finish() == -signal.SIGKILL, command.describe()
        else:
            died = command.wait_event("server_died", lambda event: event["instance"] == self.cell.dies)
            assert "SIGKILL" in died["detail"], died
            command.finish()
        self.history.observe()

    def go_on(self) -> CommandLine:
        """The one command that finishes the run, if it is not finished yet."""
        last = self.commands[-1]
        if last.process.returncode != 0:
            last = self.started(self.site.restore()) if self.cell.run_exists else self.collect()
            assert last.finish() == 0, last.describe()
        self.history.observe()
        return last

    def close(self) -> None:
        for command in self.commands:
            command.close()


def prove(cell: Cell, root: Path, reference: dict[tuple[int, int], Any]) -> None:
    played = Played(cell, root)
    try:
        played.die()
        last = played.go_on()
    finally:
        played.close()
    done = last.events[-1]
    counts = (done["planned"], done["succeeded"], done["failed"], done["omitted"], done["unresolved"])
    assert counts == (ROLLOUTS, ROLLOUTS, 0, 0, 0), last.describe()
    assert outcomes(played.site.rows()) == reference
    restored = played.history.check()
    if cell.phase == "resume" or (cell.passage > 1 and cell.dies != COLLECTOR):
        assert restored > 0, f"nothing was restored\n{last.describe()}"
    assert max(Counter(name for name, _ in played.history.sources()).values()) <= 6


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_a_run_outlives_a_death_at(cell: Cell, tmp_path: Path, undisturbed: dict[tuple[int, int], Any]) -> None:
    prove(cell, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("cell", SLOW, ids=str)
def test_a_run_outlives_any_death_at(cell: Cell, tmp_path: Path, undisturbed: dict[tuple[int, int], Any]) -> None:
    prove(cell, tmp_path, undisturbed)
