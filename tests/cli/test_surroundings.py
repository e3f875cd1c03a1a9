"""A collector started as shells, schedulers and terminals start and end things."""

import signal
import subprocess
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
    # Python tells of each module as it is loaded; this one is loaded by the verb itself, long before anything is begun.
    command = [GYMCKPT[0], "-X", "importtime", *GYMCKPT[1:], "collect", "@workbench", "--run-dir", "run"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if line.endswith(b" gymckpt.collection.inputs\n"))
        process.send_signal(number)
        told = process.stderr.read()
    assert process.returncode == 75, told
    assert b"Traceback" not in told
    assert not (tmp_path / "run").exists()
