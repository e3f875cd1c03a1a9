"""What goes wrong is one clear message with the right exit code, and nothing is lost."""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.runs import ROLLOUTS
from tests.cli.terminal import GYMCKPT, environment, gymckpt, inline

TOKEN = "a-token-for-tests"


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """`--url` flags of servers that run apart from any collector."""
    with subprocess.Popen(
        [*GYMCKPT, "serve", "--json", "--taskset", "answers", "--lease", "5"],
        cwd=tmp_path_factory.mktemp("served"),
        env=environment({"GYMCKPT_CONTROL_TOKEN": TOKEN}),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            servers = json.loads(process.stdout.readline())["servers"]
            found = [f"{s['instance']}={s['url']}" for s in servers if s["kind"] != "worker"]
            yield [part for pair in found for part in ("--url", pair)]
        finally:
            process.terminate()


def _one_message(done: "subprocess.CompletedProcess[str]", *parts: str) -> None:
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert all(part in done.stderr for part in parts), done.stderr


def test_a_wrong_token_is_refused_before_anything_is_begun(urls: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["collect", "@answers", "--limit", "2", *urls, "--run-dir", str(run)]
    done = gymckpt(*arguments, env={"GYMCKPT_CONTROL_TOKEN": "another"})
    assert done.returncode == 5
    _one_message(done, "unauthorized", "GYMCKPT_CONTROL_TOKEN")
    assert "another" not in done.stderr.replace("another process", "")
    assert not (run / "run.json").exists()
    assert gymckpt("status", *urls, env={"GYMCKPT_CONTROL_TOKEN": "another"}).returncode == 5


def test_separate_servers_work_with_the_right_token_and_another_identity_is_refused(
    urls: list[str], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    common = ["collect", "@answers", *urls, "--control-token-file", str(token), "--run-dir", str(tmp_path / "run")]
    first = gymckpt(*common, "--limit", "3")
    assert first.returncode in (0, 1), first.stderr
    assert not any(TOKEN in path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*.json*"))
    refused = gymckpt(*common, "--limit", "2", "--resume")
    assert refused.returncode == 3
    _one_message(refused, "limit", "--accept-change")
    status = gymckpt("status", str(tmp_path / "run"), "--control-token-file", str(token), "--json")
    assert {server["phase"] for server in json.loads(status.stdout)["servers"]} == {"idle"}


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"environment=http://127.0.0.1:{bound.getsockname()[1]}"
        done = gymckpt("collect", "@answers", "--url", url, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 5
    _one_message(done, "environment", "refused")


def test_three_bad_rows_are_three_lines_of_one_message(urls: list[str], tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"a": 1}\nnot json\n[]\n')
    arguments = ["collect", str(tmp_path / "tasks.jsonl"), *urls, "--run-dir", str(tmp_path / "run")]
    done = gymckpt(*arguments, env={"GYMCKPT_CONTROL_TOKEN": TOKEN})
    assert done.returncode == 2
    _one_message(done, "line 1", "line 2", "line 3")
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_damaged_newest_checkpoint_and_a_torn_journal_cost_nothing_but_time(run: Path) -> None:
    listed = json.loads(inline("inspect", str(run), "--json").stdout)["checkpoints"]
    older, newest = (checkpoint["checkpoint_id"] for checkpoint in listed)
    manifest = run / "checkpoints" / newest / "gym" / "agent" / "agent" / "manifest.json"
    manifest.unlink()
    for journal in (run / "journal").glob("dispatch-*"):
        with journal.open("ab") as file:
            file.write(b'{"torn')
    done = gymckpt("restore", str(run), "--json")
    assert done.returncode in (0, 1), done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (restored,) = (event for event in events if event["event"] == "restored")
    assert (restored["checkpoint_id"], restored["episodes"]) == (older, ROLLOUTS)
    assert any(newest in event["text"] for event in events if event["event"] == "note")
    assert events[-1]["unresolved"] == 0


def test_a_dry_run_says_what_would_happen_and_changes_nothing(run: Path) -> None:
    before = {
        path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and "servers" not in path.parts
    }
    done = gymckpt("restore", str(run), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"{ROLLOUTS} rollouts to do" in done.stdout
    assert "restore" in done.stderr
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and "servers" not in path.parts}
    assert before == after


def test_with_nothing_whole_to_stand_on_a_restore_changes_nothing(run: Path) -> None:
    for manifest in (run / "checkpoints").glob("*/gym/agent/agent/manifest.json"):
        manifest.unlink()
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    done = gymckpt("restore", str(run))
    assert done.returncode == 4
    _one_message(done, "no checkpoint of this run is whole", "--start-over")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


def test_checkpoints_that_are_gone_are_said_before_anything_starts_over(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    done = gymckpt("restore", str(run))
    assert done.returncode == 4
    _one_message(done, "was published, and is not there", "--start-over")


def test_a_damaged_journal_is_named_with_its_place(run: Path) -> None:
    journal = next((run / "journal").glob("events-*"))
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)
    for arguments in (["restore", str(run)], ["verify", str(run)], ["inspect", str(run)]):
        done = gymckpt(*arguments)
        assert done.returncode == 4
        assert journal.name in done.stdout + done.stderr


@pytest.mark.parametrize("kept", [0.5, 0.0])
@pytest.mark.parametrize("name", ["dispatch", "events"])
def test_a_journal_shorter_than_a_checkpoint_knows_it_is_damage_to_every_verb(
    run: Path, name: str, kept: float
) -> None:
    journal = next((run / "journal").glob(f"{name}-*"))
    whole = journal.read_bytes()
    journal.write_bytes(whole[: int(len(whole) * kept)])
    for arguments in (["restore", str(run), "--dry-run"], ["verify", str(run)], ["inspect", str(run)]):
        done = gymckpt(*arguments)
        assert done.returncode == 4, (arguments, done.stdout)
        assert journal.name in done.stdout + done.stderr
    assert json.loads(inline("verify", str(run), "--json").stdout)["restorable"] is None


def test_a_full_disk_stops_the_run_and_the_same_directory_goes_on(run: Path) -> None:
    full = {"GYMCKPT_CRASH_AT": "journal.before_write:enospc:2", "GYMCKPT_CRASH_IN": "collector"}
    done = gymckpt("restore", str(run), env=full)
    assert done.returncode == 75, done.stderr
    _one_message(done, "No space left")
    assert json.loads(inline("inspect", str(run), "--json").stdout)["unresolved"] == ROLLOUTS


def test_a_directory_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    done = gymckpt("collect", "@answers", "--run-dir", str(tmp_path))
    assert done.returncode == 2
    _one_message(done, "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("tasks", ["nosuch.jsonl", "@nosuch"])
def test_rows_that_are_not_there_are_named_before_any_server_is_started(tasks: str, tmp_path: Path) -> None:
    done = gymckpt("collect", tasks, "--serve", "--run-dir", str(tmp_path / "run"), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    _one_message(done, "nosuch")
    assert "starting" not in done.stderr


def test_a_directory_that_cannot_be_made_is_the_users_error() -> None:
    done = gymckpt("collect", "@answers", "--run-dir", "/proc/nothing/here")
    assert done.returncode == 2, done.stderr
    _one_message(done, "/proc/nothing")


def test_a_run_of_a_later_format_is_refused_by_name(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").unlink()
    (run / "run.json").write_text(json.dumps({**record, "format": record["format"] + 1}))
    done = gymckpt("restore", str(run))
    assert done.returncode == 3
    _one_message(done, "newer gymckpt")
    shutil.rmtree(run)
