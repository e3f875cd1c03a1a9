"""A session whose export fails or hangs costs a run that checkpoint, and nothing else."""

from pathlib import Path

import pytest
import yaml

from tests.process.deployments import Site

ROLLOUTS = 3
CHECKOUT = {"PYTHONPATH": str(Path(__file__).parents[2])}
"""Where the server's code is found."""
TOOK_LONGER = "a hook took longer than 0.5 s"
SAID = {
    "fail": "RuntimeError: the state is nowhere",
    "swallow": TOOK_LONGER,
    "threads": TOOK_LONGER,
}


@pytest.mark.parametrize("trouble", SAID)
def test_a_failed_export_fails_that_checkpoint_by_name_and_the_run_goes_on_to_the_next(
    tmp_path: Path, trouble: str
) -> None:
    site = Site(tmp_path, latency_s=0.3).prepare()
    mark = tmp_path / "trouble"
    mark.write_text(trouble)
    deployment = yaml.safe_load(site.config.read_text())
    for server in deployment["servers"]:
        if server["instance"] == "workbench":
            server["implementation"] = "tests.process.frail_server:build"
            server["options"] = {"trouble": str(mark)}
    site.config.write_text(yaml.safe_dump(deployment))
    command = site.collect("@workbench", "--limit", str(ROLLOUTS), "--checkpoint-every", "500ms", environment=CHECKOUT)
    try:
        failed = command.wait_event("checkpoint_failed")
        again = command.wait_event("checkpoint_failed", lambda event: event != failed)
        for event in (failed, again):
            assert "session " in event["reason"]
            assert f"{SAID[trouble]} (episode " in event["reason"]
        assert not list(site.run_directory.glob("checkpoints/*/CHECKPOINT.json"))
        mark.unlink()
        published = command.wait_event("checkpoint", lambda event: event["episodes"] > 0)
        assert published["checkpoint_id"] > again["checkpoint_id"]
        assert command.finish() == 0, command.describe()
        assert command.events[-1]["succeeded"] == ROLLOUTS
    finally:
        command.close()
