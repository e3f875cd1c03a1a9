"""A resources server of NeMo Gym that is killed and started again empty in mid-run never gives a wrong reward."""

import os
import signal
from pathlib import Path

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
    typed,
    worker,
)
from tests.interop.test_mixes import COLLECT, ROLLOUTS, assert_each_once
from tests.process.test_separate_servers import child_of

pytestmark = pytest.mark.interop

PACED = worker(latency_s=0.15)
SERVERS: dict[str, tuple[list[Server], bool]] = {
    "under our environment and agent": (
        [our_environment(counters="counters"), our_agent(), our_model(), their_counters(), PACED],
        False,
    ),
    "under their agent": ([their_agent(), our_model(), their_counters(), PACED], True),
}
"""Servers, and whether rows are flat."""


@pytest.mark.parametrize("where", SERVERS)
def test_its_episodes_are_void_and_tried_again(tmp_path: Path, where: str) -> None:
    deployed, is_flat = SERVERS[where]
    site = MixedSite(tmp_path).deploy(*deployed)
    rows = counter_rows(ROLLOUTS)
    servers = site.serve()
    command = site.collect_from(servers, site.task_file(flat(rows) if is_flat else typed(rows, "counters")), *COLLECT)
    try:
        command.wait_event("outcome")
        assert command.wait_checkpoint(lambda: True)
        os.kill(child_of(servers, "counters"), signal.SIGKILL)
        assert command.finish() == 0, command.describe()
        assert any("started again: resources counters" in str(e.get("text")) for e in command.events), (
            command.describe()
        )
        assert_each_once(site)
    finally:
        command.close()
        servers.close()
