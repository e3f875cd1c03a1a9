"""The main proof: rollouts run, everything is killed at bad moments, and one command continues each of them."""

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.process.deployments import Site
from tests.process.history import History, outcomes
from tests.process.processes import CommandLine

ROLLOUTS = 60
AUDITED = ("workbench", "policy_model")
SEED = 20261129
COLLECT = ("@workbench", "--limit", str(ROLLOUTS), "--checkpoint-every", "1s", "--concurrency", "20")


@dataclass(frozen=True)
class Reference:
    """What a run that nobody touched gave."""

    outcomes: dict[tuple[int, int], Any]
    calls: dict[str, Counter[tuple[int, ...]]]


def history_of(site: Site) -> History:
    return History(site.run_directory, {name: site.audit(name) for name in AUDITED})


def collect_undisturbed(root: Path) -> Reference:
    site = Site(root).prepare()
    command = site.collect(*COLLECT)
    try:
        assert command.finish() == 0, command.describe()
    finally:
        command.close()
    history = history_of(site)
    return Reference(outcomes(site.rows()), {server: history.calls_that_counted(server) for server in AUDITED})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return collect_undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path).prepare()


def kill_when_far_enough(command: CommandLine, site: Site, history: History, moment: random.Random) -> bool:
    """Kill everything some calls after a checkpoint that proves something; False if the run ended before."""
    audit = site.audit("workbench")

    if not command.wait_checkpoint(history.far_enough):
        return False
    size = audit.stat().st_size + moment.randrange(4000)
    command.wait_until(lambda: audit.stat().st_size >= size or command.done)
    command.kill_everything()
    history.observe()
    return True


def prove(site: Site, kills: int, reference: Reference) -> None:
    """Kill `kills` times, restore each time, and check everything at the end."""
    history = history_of(site)
    moments = random.Random(SEED + kills)
    command = site.collect(*COLLECT)
    commands = [command]
    killed = 0
    try:
        for _ in range(kills):
            if not kill_when_far_enough(command, site, history, moments):
                break
            killed += 1
            command = site.restore()
            commands.append(command)
            restored = command.wait_event("restored")
            assert restored["episodes"] > 0, command.describe()
        assert command.finish() == 0, command.describe()
    finally:
        for started in commands:
            started.close()
    history.observe()
    done = command.events[-1]
    assert done["event"] == "done"
    assert (done["planned"], done["succeeded"], done["failed"]) == (ROLLOUTS, ROLLOUTS, 0)
    assert (done["omitted"], done["unresolved"]) == (0, 0)
    assert killed == kills, f"only {killed} kills found a checkpoint to stand on"
    assert outcomes(site.rows()) == reference.outcomes
    assert history.check() >= killed
    for server in AUDITED:
        # Whatever else was called was lost with a crash, after the boundary that was used: nothing was done twice.
        assert history.calls_that_counted(server) == reference.calls[server]


def test_after_three_kills_of_everything_each_episode_goes_on_from_its_boundary(
    site: Site, undisturbed: Reference
) -> None:
    prove(site, 3, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_ten_kills_of_everything_each_episode_goes_on_from_its_boundary(
    site: Site, undisturbed: Reference
) -> None:
    prove(site, 10, undisturbed)
