"""A collector started as shells, schedulers and terminals start and end things."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import GYMCKPT, environment
from tests.cli.wild import serving, tasks_file

AS_SHELL = ["/bin/sh", "-c"]


def in_shell(redirections: str, directory: Path, *flags: str) -> tuple[subprocess.CompletedProcess[bytes], Path]:
    run = directory / "run"
    tasks = tasks_file(directory, ["good"])
    with serving() as url:
        command = [*GYMCKPT, "collect", tasks, "--url", f"environment={url}", "--run-dir", str(run), *flags]
        done = subprocess.run(
            [*AS_SHELL, f'exec "$@" {redirections}', "sh", *command],
            env=environment(),
            capture_output=True,
            timeout=60,
            check=False,
        )
    return done, run


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_harm_nothing(closed: str, tmp_path: Path) -> None:
    done, run = in_shell(closed, tmp_path)
    assert done.returncode == 0, done
    assert len((run / "rollouts.jsonl").read_bytes().splitlines()) == 1


def test_events_that_cannot_be_written_are_no_success(tmp_path: Path) -> None:
    done, run = in_shell(">/dev/full", tmp_path, "--json")
    assert done.returncode == 75, done
    assert b"standard output: No space left" in done.stderr
    assert b"Traceback" not in done.stderr
    assert len((run / "rollouts.jsonl").read_bytes().splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_program_still_loads_exits_as_one_that_can_be_gone_on_with(
    number: signal.Signals, tmp_path: Path
) -> None:
    # The signal comes from inside, at the first moment after the command began: there is none that is earlier.
    early = (
        "import os, signal, sys; from gymckpt.commands import app, collect; "
        f"collect.flags.load = lambda *a: os.kill(os.getpid(), {int(number)}) or signal.pause(); "
        "sys.argv = ['gymckpt', 'collect', '@workbench']; app.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", early], cwd=tmp_path, env=environment(), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 75, done
    assert b"stopped before anything was begun" in done.stderr
    assert b"Traceback" not in done.stderr
