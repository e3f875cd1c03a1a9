"""A collector's memory is that of what is in flight, whatever it has finished."""

import json
import socketserver
import subprocess
import threading
from pathlib import Path

import pytest

from tests.cli.terminal import GYMCKPT, environment

REPLY = json.dumps({"reward": 1.0, "padding": "x" * 300_000}).encode()
ROLLOUTS = 1600
EARLY = 300


class _Handler(socketserver.StreamRequestHandler):
    """Answers every `/run` with the same large reply, on a connection that stays."""

    def handle(self) -> None:
        while asked := self.rfile.readline():
            length = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            self.rfile.read(length)
            status, body = ("200 OK", REPLY) if b" /run " in asked else ("404 Not Found", b"{}")
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            self.wfile.write(head.encode() + body)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


def _memory_mb(process: "subprocess.Popen[bytes]") -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) >> 10


@pytest.mark.slow
def test_large_replies_that_were_finished_with_leave_nothing_behind(tmp_path: Path) -> None:
    row = {"task_id": {"taskset": "t", "task_id": "1"}, "task_input": {"responses_create_params": {}}}
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(row) + "\n")
    flags = ["--repeats", str(ROLLOUTS), "--concurrency", "16", "--run-dir", str(tmp_path / "run"), "--json"]
    with _Server(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"environment=http://127.0.0.1:{server.server_address[1]}"
        command = [*GYMCKPT, "collect", str(tasks), "--url", url, *flags]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            events = map(json.loads, process.stdout)
            seen = [_memory_mb(process) for event in events if event["event"] == "outcome"]
        server.shutdown()
        thread.join()
    assert len(seen) == ROLLOUTS
    assert max(seen[-EARLY:]) < 1.5 * max(seen[:EARLY]) + 50, (max(seen[:EARLY]), max(seen[-EARLY:]))
