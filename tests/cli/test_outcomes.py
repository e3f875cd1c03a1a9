"""retry and resolve, against an environment server that is not a participant and fails as it is told."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.terminal import gymckpt, inline


class _Environment(ThreadingHTTPServer):
    """Answers `/run` with a terminal failure for the tasks in `failing`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.failing: set[str] = set()
        self.kind = "told"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/run":
            self._answer(404, {})
            return
        task_id = body["task"]["task_id"]
        answer: dict[str, Any] = {"episode_id": body["episode_id"], "task_id": task_id}
        assert isinstance(self.server, _Environment)
        if task_id["task_id"] in self.server.failing:
            answer["failure"] = {
                "failure_reason": "told to",
                "terminal": True,
                "failure_kind": self.server.kind,
                "stage": "agent",
            }
        else:
            answer["result"] = {"reward": 1.0, "response": {"output": []}}
        self._answer(200, answer)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        return


@pytest.fixture
def environment_server() -> Iterator[_Environment]:
    with _Environment() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _tasks(directory: Path, *names: str) -> Path:
    rows = [
        {"task_id": {"taskset": "t", "task_id": name}, "task_input": {"responses_create_params": {"input": name}}}
        for name in names
    ]
    path = directory / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_failed_rollouts_are_listed_opened_again_and_then_succeed(
    environment_server: _Environment, tmp_path: Path
) -> None:
    environment_server.failing = {"b", "c"}
    run, url = str(tmp_path / "run"), f"environment={environment_server.url}"
    first = gymckpt("collect", str(_tasks(tmp_path, "a", "b", "c")), "--url", url, "--run-dir", run)
    assert first.returncode == 1, first.stderr
    assert "succeeded 1, failed 2" in first.stdout
    assert f"failures {run}/failures.jsonl" in first.stdout

    listed = json.loads(inline("retry", run, "--json").stdout)
    assert (listed["reopened"], sum(listed["failed_by_kind"].values())) == ([], 2)
    (kind,) = listed["failed_by_kind"]
    assert inline("retry", run, "--kind", "no-such-kind").returncode == 2

    environment_server.failing = {"c"}
    reopened = json.loads(inline("retry", run, "--kind", kind, "--json").stdout)["reopened"]
    assert len(reopened) == 2
    again = gymckpt("restore", run, "--json")
    assert again.returncode == 1, again.stderr
    done = json.loads(again.stdout.splitlines()[-1])
    assert (done["succeeded"], done["failed"], done["unresolved"]) == (2, 1, 0)

    (still,) = json.loads(inline("retry", run, "--all", "--json").stdout)["reopened"]
    assert inline("resolve", run, still, "--omit").returncode == 0
    seen = json.loads(inline("inspect", run, "--json").stdout)
    assert [seen[name] for name in ("planned", "succeeded", "failed", "omitted", "unresolved")] == [3, 2, 0, 1, 0]
    assert gymckpt("restore", run).returncode == 0


def test_what_a_server_says_does_not_drive_the_terminal(environment_server: _Environment, tmp_path: Path) -> None:
    environment_server.failing, environment_server.kind = {"a"}, "red\x1b[31m\x07\u202e"
    run, url = str(tmp_path / "run"), f"environment={environment_server.url}"
    told = [gymckpt("collect", str(_tasks(tmp_path, "a")), "--url", url, "--run-dir", run)]
    told += [inline(verb, run) for verb in ("retry", "report", "inspect")]
    for one in told:
        assert not set(one.stdout + one.stderr) & set("\x1b\x07\u202e"), one
    assert "red\\x1b[31m\\x07\\u202e" in told[1].stdout
    assert json.loads(inline("report", run, "--json").stdout)["failures"] == {environment_server.kind: 1}


def _gone(journal: Path) -> None:
    shutil.rmtree(journal)


def _outcomes_gone(journal: Path) -> None:
    for path in journal.glob("outcomes-*"):
        path.unlink()


def _outcomes_short(journal: Path) -> None:
    """As if nothing after the first outcome had been written: the index, which knows more, is gone too."""
    (frames,) = journal.glob("outcomes-*.zst")
    (index,) = journal.glob("outcomes-*.index.jsonl")
    line = json.loads(index.read_text().splitlines()[1])
    os.truncate(frames, line["at"][0])
    index.unlink()


@pytest.mark.parametrize("damage", [_gone, _outcomes_gone, _outcomes_short])
def test_whoever_reads_a_run_whose_outcomes_are_gone_is_told_so(
    environment_server: _Environment, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run, url = tmp_path / "run", f"environment={environment_server.url}"
    environment_server.failing = {"b"}
    tasks = str(_tasks(tmp_path, "a", "b", "c"))
    done = gymckpt("collect", tasks, "--url", url, "--run-dir", str(run), "--concurrency", "1")
    assert done.returncode == 1, done.stderr
    damage(run / "journal")
    rows = (run / "rollouts.jsonl").read_bytes()
    verbs = [["export"], ["report"], ["inspect"], ["verify"], ["retry", "--all"], ["restore", "--dry-run"], ["restore"]]
    for verb, *flags in verbs:
        told = inline(verb, str(run), *flags)
        assert told.returncode == 4, (verb, told.stdout, told.stderr)
        assert "journal" in told.stdout + told.stderr
    assert (run / "rollouts.jsonl").read_bytes() == rows


def test_a_result_cannot_be_resolved_away_and_status_knows_the_servers_of_a_run(
    environment_server: _Environment, tmp_path: Path
) -> None:
    run, url = str(tmp_path / "run"), f"environment={environment_server.url}"
    done = gymckpt("collect", str(_tasks(tmp_path, "a")), "--url", url, "--run-dir", run, "--json")
    assert done.returncode == 0, done.stderr
    (rollout_id,) = (e["rollout_id"] for e in map(json.loads, done.stdout.splitlines()) if e["event"] == "outcome")
    asked = gymckpt("status", run, "--json", env={"GYMCKPT_CONTROL_TOKEN": "a-token"})
    (server,) = json.loads(asked.stdout)["servers"]
    assert (server["instance"], server["kind"], server["problem"]) == ("environment", None, None)
    refused = inline("resolve", run, rollout_id, "--omit")
    assert refused.returncode == 3
    assert "its result stays" in refused.stderr
    assert inline("resolve", run, "nonsense", "--omit").returncode == 2
    assert inline("resolve", run, rollout_id).returncode == 2
