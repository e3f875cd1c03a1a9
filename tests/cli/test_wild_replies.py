"""Whatever a server sends, it costs the rollouts that it answered so, and neither the run nor its journals."""

import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.terminal import gymckpt, inline


def _json(body: str) -> bytes:
    data = body.encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data


def _failed(kind: str) -> bytes:
    return _json(f'{{"failure_kind": "{kind}", "failure_reason": "{kind}"}}')


def _deep(levels: int) -> str:
    return "[" * levels + "]" * levels


REPLIES: dict[str, tuple[bytes, str | None]] = {
    "good": (_json('{"reward": 1}'), None),
    "no status line": (b"what is this?\r\n\r\n", "connection"),
    "bad length": (b"HTTP/1.1 200 OK\r\ncontent-length: ten\r\n\r\n{}", "connection"),
    "two lengths": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}", "connection"),
    "endless length": (b"HTTP/1.1 200 OK\r\ncontent-length: %s\r\n\r\n{}" % (b"9" * 40), "connection"),
    "long header": (b"HTTP/1.1 200 OK\r\nx: %s\r\n\r\n" % (b"x" * 100_000), "connection"),
    "status 2000": (b"HTTP/1.1 2000 OK\r\ncontent-length: 2\r\n\r\n{}", "connection"),
    "more than it said": (_json("{}") + b"more", "connection"),
    "huge integer": (_json('{"reward": 1%s}' % ("0" * 400)), "no_reward"),
    "huger integer": (_json('{"reward": 1%s}' % ("0" * 9000)), "no_reward"),
    "deep reward": (_json(f'{{"reward": {_deep(1010)}}}'), "no_reward"),
    "deep result": (_json(f'{{"reward": 1, "more": {_deep(1010)}}}'), "bad_reply"),
    "half a character": (_failed("\\ud800"), "?"),
    "long kind": (_failed("k" * 100_000), "k" * 200),
}


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        asked = self.rfile.readline()
        length = 0
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        body = self.rfile.read(length)
        if b" /run " not in asked:
            self.wfile.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            return
        self.wfile.write(REPLIES[json.loads(body)["task"]["task_id"]["task_id"]][0])


@pytest.fixture
def url() -> Iterator[str]:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_wild_reply_costs_its_own_rollout_and_nothing_else(url: str, tmp_path: Path) -> None:
    names = list(REPLIES)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        "".join(
            json.dumps({"task_id": {"taskset": "t", "task_id": n}, "task_input": {"responses_create_params": {}}})
            + "\n"
            for n in names
        )
    )
    run = tmp_path / "run"
    done = gymckpt("collect", str(tasks), "--url", f"environment={url}", "--run-dir", str(run), "--max-attempts", "1")
    assert done.returncode == 1, done.stderr
    failures = map(json.loads, (run / "failures.jsonl").read_text().splitlines())
    kinds = {names[row["_ng_task_index"]]: row["failure_kind"] for row in failures}
    assert kinds == {name: kind for name, (_, kind) in REPLIES.items() if kind is not None}
    for verb in ("verify", "report", "export", "inspect", "retry", "restore"):
        told = inline(verb, str(run))
        assert told.returncode == 0, (verb, told.stdout, told.stderr)


def test_a_row_that_is_too_deep_to_be_sent_is_a_bad_row(url: str, tmp_path: Path) -> None:
    row = {"task_id": {"taskset": "t", "task_id": "good"}, "task_input": {"responses_create_params": {}}}
    text = json.dumps(row)[:-2] + f', "task_data": {{"deep": {_deep(995)}}}}}}}'
    (tmp_path / "tasks.jsonl").write_text(text + "\n")
    told = gymckpt("collect", str(tmp_path / "tasks.jsonl"), "--url", f"environment={url}", cwd=tmp_path)
    assert told.returncode == 2, told.stderr
    assert "line 1: nested more than" in told.stderr
