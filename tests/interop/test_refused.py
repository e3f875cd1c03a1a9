"""A rollout that an inner server refuses because it is closed is void, and counts as no failure of the rollout."""

from pathlib import Path

import pytest

from tests.interop.mixes import MixedSite, counter_rows, flat, our_model, their_agent, their_counters, worker
from tests.interop.test_mixes import ROLLOUTS, assert_each_once
from tests.process.deployments import TOKEN
from tests.process.processes import CommandLine

pytestmark = pytest.mark.interop


def test_with_the_agent_alone_a_refusal_that_it_answers_as_http_500_is_none_of_the_rollout(tmp_path: Path) -> None:
    counters = their_counters()
    counters["implementation"] = "tests.interop.refusing:build"
    counters["options"]["refusals"] = ROLLOUTS
    site = MixedSite(tmp_path).deploy(their_agent(), our_model(), counters, worker())
    servers = site.serve()
    agent = next(s["url"] for s in servers.wait_event("ready")["servers"] if s["instance"] == "agent")
    command = CommandLine(
        "collect",
        site.task_file(flat(counter_rows(ROLLOUTS))),
        *("--url", f"agent={agent}", "--run-dir", str(site.run_directory), "--max-attempts", "1", "--json"),
        environment=TOKEN,
        log=tmp_path / "collect.log",
    )
    try:
        assert command.finish() == 0, command.describe()
        assert command.events[-1]["succeeded"] == ROLLOUTS
        assert_each_once(site)
        assert {row["_ng_attempt_index"] for row in site.rows()} == {1}
    finally:
        command.close()
        servers.close()
