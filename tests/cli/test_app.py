"""What holds for every verb: help, errors, exit codes, output."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import app
from gymckpt import errors
from tests.cli.terminal import GYMCKPT, environment, gymckpt, inline

VERBS = sorted(command.name for command in app.app.registered_commands if command.name and not command.hidden)


def test_help_lists_every_verb_and_hides_the_one_for_tests() -> None:
    shown = gymckpt("--help").stdout
    assert all(f" {verb} " in shown for verb in VERBS)
    assert "crash-points" not in shown


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_each_verb_ends_with_an_example(verb: str) -> None:
    command = next(command for command in app.app.registered_commands if command.name == verb)
    assert command.epilog is not None
    assert f"gymckpt {verb}" in command.epilog


@pytest.mark.parametrize(
    "arguments", [["no-such-verb"], ["serve", "--no-such-flag"], ["schema", "no-such-schema"], ["schema", "a", "b"]]
)
def test_a_wrong_command_line_is_one_message_and_exit_2(arguments: list[str]) -> None:
    done = gymckpt(*arguments)
    assert done.returncode == errors.UsageError.exit_code
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") <= 2
    assert "Traceback" not in done.stderr


def test_a_traceback_is_shown_only_with_debug() -> None:
    done = gymckpt("schema", "no-such-schema", "--debug")
    assert done.returncode == errors.UsageError.exit_code
    assert "Traceback" in done.stderr
    assert done.stderr.startswith("error: there is no schema")


def test_a_bug_is_exit_70_with_one_line_and_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schemas = importlib.import_module("commands.schemas")
    monkeypatch.delattr(schemas, "SCHEMAS")
    assert app.run(["schema"]) == 70
    shown = capsys.readouterr().err.split("\n")
    assert shown[0].startswith("internal error: ImportError")
    assert "--debug" in shown[1]


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    with subprocess.Popen(
        [*GYMCKPT, "schema", "settings"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_the_command_runs_from_the_checkout_and_from_elsewhere(tmp_path: Path) -> None:
    checkout = Path(__file__).resolve().parents[2]
    for directory in (checkout, tmp_path):
        done = subprocess.run(
            [sys.executable, "-m", "gymckpt.commands", "--version"],
            cwd=directory,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "0.1.0"


def test_no_color_means_no_escape_codes() -> None:
    shown = gymckpt("--help", env={"NO_COLOR": "1", "TERM": "xterm-256color"})
    assert "\x1b" not in shown.stdout


def test_a_shell_is_offered_the_verbs() -> None:
    """Asked as the shell's completion script asks: which shell runs the tests does not matter."""
    asked = {"_GYMCKPT_COMPLETE": "complete_bash", "COMP_WORDS": "gymckpt re", "COMP_CWORD": "1"}
    completed = gymckpt(env=asked)
    assert sorted(completed.stdout.split()) == [verb for verb in VERBS if verb.startswith("re")]


def test_crash_points_are_listed_for_tests() -> None:
    listed = json.loads(gymckpt("crash-points", "--json").stdout)["crash_points"]
    assert listed
    assert all(where for where in listed.values())


@pytest.mark.parametrize(
    "verb", ["checkpoint", "export", "inspect", "prune", "report", "restore", "retry", "status", "verify"]
)
def test_a_directory_without_a_run_is_a_usage_error_for_every_verb(verb: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "empty", tmp_path / "missing"):
        done = inline(verb, str(directory))
        assert done.returncode == 2, done.stderr
        assert str(directory) in done.stderr
    assert not (tmp_path / "missing").exists()
