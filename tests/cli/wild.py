"""An environment server that answers each task as its name says, well or wildly."""

import json
import socketserver
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def _json(body: str) -> bytes:
    data = body.encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data


def _failed(kind: str) -> bytes:
    return _json(f'{{"failure_kind": "{kind}", "failure_reason": "{kind}"}}')


def deep(levels: int) -> str:
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
    "deep reward": (_json(f'{{"reward": {deep(1010)}}}'), "no_reward"),
    "deep result": (_json(f'{{"reward": 1, "more": {deep(1010)}}}'), "bad_reply"),
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


@contextmanager
def serving() -> Iterator[str]:
    """The URL of such a server."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def tasks_file(directory: Path, names: Iterable[str]) -> str:
    """Typed rows of these tasks."""
    rows = [
        {"task_id": {"taskset": "t", "task_id": name}, "task_input": {"responses_create_params": {}}} for name in names
    ]
    path = directory / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
