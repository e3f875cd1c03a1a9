"""Real runs for tests of the command line: bundled servers, slowed down where there must be time to act."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cli.terminal import GYMCKPT, environment, inline

ROLLOUTS = 4


def deployment_file(directory: Path, latency_s: float) -> Path:
    """The bundled servers with a worker that takes its time."""
    deployment = yaml.safe_load(inline("serve", "--print-config", "--taskset", "workbench").stdout)
    for server in deployment["servers"]:
        if server["instance"] == "worker":
            server["options"] = {"latency_s": latency_s}
    path = directory / "deployment.yaml"
    path.write_text(yaml.safe_dump(deployment))
    return path


@contextmanager
def collecting(*arguments: str, cwd: Path) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [*GYMCKPT, "collect", *arguments, "--json"],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(process: "subprocess.Popen[str]", name: str, minimum: int = 0) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == name and event.get("episodes", minimum) >= minimum:
            return event
        assert event["event"] != "done", event
    raise AssertionError(f"it ended without {name}")


def interrupted_run(place: Path) -> Path:
    """A run that was killed with all its servers, every episode in flight, two checkpoints published."""
    slow = str(deployment_file(place, 0.5))  # however late the kill comes, no episode has ended
    arguments = ["@workbench", "--limit", str(ROLLOUTS), "--serve-config", slow, "--checkpoint-every", "1s"]
    with collecting(*arguments, "--run-dir", "run", cwd=place) as process:
        until(process, "checkpoint", minimum=ROLLOUTS)
        until(process, "checkpoint", minimum=ROLLOUTS)
        process.send_signal(signal.SIGKILL)
    deployment_file(place, 0.15)  # what goes on with it need not take so long
    return place / "run"
