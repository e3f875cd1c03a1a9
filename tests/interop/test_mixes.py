"""Every row of the table of mixes in docs/nemo-gym.md, each with everything killed in the middle."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.interop.mixes import (
    MixedSite,
    Server,
    counter_rows,
    flat,
    our_agent,
    our_environment,
    our_model,
    their_agent,
    their_counters,
    their_environment,
    their_model,
    their_relay,
    their_uncaptured_counters,
    typed,
    worker,
)

pytestmark = pytest.mark.interop

ROLLOUTS = 8
PACED = worker(latency_s=0.15)
COLLECT = ("--checkpoint-every", "500ms", "--concurrency", "4")

CONTINUES: dict[str, list[Server]] = {
    "their resources": [our_environment(counters="counters"), our_agent(), our_model(), their_counters(), PACED],
    "their resources over MCP": [
        our_environment("mcp", counters="counters"),
        our_agent(),
        our_model(),
        their_counters(expose_tools_over_mcp=True),
        PACED,
    ],
    "their resources and model": [
        our_environment(counters="counters"),
        our_agent(),
        their_model(),
        their_counters(),
        PACED,
    ],
    "their model without the control plane": [
        our_environment(counters="counters"),
        our_agent(),
        their_model(participates=False),
        their_counters(),
        PACED,
    ],
}


@pytest.mark.parametrize("mix", CONTINUES)
def test_episodes_go_on_after_everything_was_killed(tmp_path: Path, mix: str) -> None:
    site = MixedSite(tmp_path).deploy(*CONTINUES[mix])
    tasks = site.task_file(typed(counter_rows(ROLLOUTS), "counters"))
    killed_in_the_middle(site, tasks, "episodes")
    continued = restored(site)
    assert continued["episodes"] > 0
    assert_each_once(site)
    assert max(row["_ng_attempt_index"] for row in site.rows()) > 0
    assert_aggregated(site)


STARTS_OVER: dict[str, tuple[list[Server], bool]] = {
    "their agent": ([our_environment(counters="counters"), their_agent(), our_model(), their_counters(), PACED], False),
    "their environment server": ([their_environment(), our_agent(), their_model(), their_counters(), PACED], False),
    "their resources, restart_only": (
        [our_environment(counters="counters"), our_agent(), our_model(), their_uncaptured_counters(), PACED],
        False,
    ),
    "their resources without the control plane": (
        [our_agent(resources_server="counters"), our_model(), their_counters(participates=False), PACED],
        True,
    ),
}
"""Servers, and whether rows are flat."""


@pytest.mark.parametrize("mix", STARTS_OVER)
def test_episodes_that_some_server_cannot_capture_start_over_and_count_once(tmp_path: Path, mix: str) -> None:
    servers, is_flat = STARTS_OVER[mix]
    site = MixedSite(tmp_path).deploy(*servers)
    rows = counter_rows(ROLLOUTS)
    tasks = site.task_file(flat(rows) if is_flat else typed(rows, "counters"))
    killed_in_the_middle(site, tasks, "restarts")
    finished = {row["_ng_rollout_id"]: row["_ng_attempt_index"] for row in site.rows()}
    assert restored(site)["episodes"] == 0
    assert_each_once(site)
    assert finished.items() <= {row["_ng_rollout_id"]: row["_ng_attempt_index"] for row in site.rows()}.items()


def test_of_a_deployment_that_is_all_gym_finished_rollouts_are_kept_and_the_others_start_over(tmp_path: Path) -> None:
    site = MixedSite(tmp_path).deploy(
        their_relay(),
        their_agent(participates=False),
        their_model(participates=False),
        their_counters(participates=False),
        PACED,
    )
    command = site.collect(site.task_file(flat(counter_rows(ROLLOUTS), "environment")), *COLLECT)
    try:
        command.wait_until(lambda: sum(event["event"] == "outcome" for event in command.events) >= 2)
        command.kill_everything()
    finally:
        command.close()
    assert not site.inspect()["checkpoints"]
    assert restored(site)["episodes"] == 0
    assert_each_once(site)
    assert_aggregated(site)


def killed_in_the_middle(site: MixedSite, tasks: str, counted: str) -> None:
    """Collect, and SIGKILL collector and servers once something has finished and checkpoints hold some of the others
    (`counted`: "episodes" that continue, or "restarts"). The first ones may still hold what has just finished."""
    command = site.collect(tasks, *COLLECT)
    try:
        command.wait_event("outcome")
        before = len(command.events)

        def holding() -> int:
            return sum(e["event"] == "checkpoint" and e[counted] >= 2 for e in command.events[before:])

        command.wait_until(lambda: holding() >= 3)
        command.kill_everything()
    finally:
        command.close()


def restored(site: MixedSite) -> dict[str, Any]:
    """Restore to the end; gives the `restored` event, or an empty one."""
    command = site.restore()
    try:
        assert command.finish() == 0, command.describe()
        done = command.events[-1]
        assert (done["planned"], done["succeeded"], done["unresolved"]) == (ROLLOUTS, ROLLOUTS, 0), command.describe()
        found = [event for event in command.events if event["event"] == "restored"]
        return found[0] if found else {"episodes": 0, "restarted": 0}
    finally:
        command.close()


def assert_each_once(site: MixedSite) -> None:
    """Every rollout has one row, and each of its additions was made exactly once."""
    rows = site.rows()
    assert Counter(row["_ng_rollout_id"] for row in rows).most_common(1)[0][1] == 1
    assert [row["reward"] for row in rows] == [1.0] * ROLLOUTS


def assert_aggregated(site: MixedSite) -> None:
    """The resources server made its own metrics of all results, kills and all."""
    [told] = json.loads((site.run_directory / "aggregate_metrics.json").read_text())
    assert (told["_ng_environment_server"], told["agent_metrics"]["mean/reward"]) == ("environment", 1.0)
    assert len(told["group_level_metrics"]) == ROLLOUTS
