"""One server in a process of its own: `python -m gymckpt.servers.child`, started by `servers.supervisor`.

The first line of standard input says what to serve (`ChildStart`, with the control token: secrets never stand on a
command line). Standard output carries one line of JSON, `{"event": "listening"}` or `{"event": "failed", ...}`, and
nothing else; logs go to standard error. The end of standard input means that the supervisor is gone, whatever killed
it: the child stops, and takes its own subprocesses with it.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

import uvicorn
from pydantic import SecretStr

from gymckpt import crashpoints, eventloop, jsoncodec
from gymckpt.errors import GymckptError
from gymckpt.participant.directories import require_root
from gymckpt.ports import ServerRef
from gymckpt.servers.deployment import Neighbours, ServerConfig
from gymckpt.servers.registry import build_app
from gymckpt.settings import Settings

STOP: Final = b"stop\n"
"""What the supervisor writes before it closes the pipe of a child that is to end in peace."""
KEEPALIVE_S: Final = 75
GRACE_S: Final = 1
"""How long requests in flight may go on once the server stops."""
FORCED_AFTER_S: Final = 3.0
"""A child whose event loop does not end by itself after the pipe closed is killed after this."""
BACKLOG: Final = 4096


class ChildStart(Settings):
    """What a child is told: its own configuration, the token, and where the others are."""

    config: ServerConfig
    port: int
    servers: dict[str, str]
    """Base URL by instance name."""
    embedded: bool
    """Ignore TERM and INT: only the supervisor ends this server."""
    token: SecretStr | None = None

    def line(self) -> bytes:
        """The line to write into the child's standard input. Holds the token: never log it."""
        token = self.token.get_secret_value() if self.token else None
        return jsoncodec.dumps({**self.model_dump(mode="json"), "token": token}) + b"\n"


def reserve(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening: the port stays ours while the server behind it is restarted.

    A connection to a port that is only bound is refused. Raises `OSError`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


class _Server(uvicorn.Server):
    """uvicorn, with a word when it listens and without its signal handlers where they are unwanted."""

    def __init__(self, config: uvicorn.Config, *, ignore_signals: bool, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._ignore_signals = ignore_signals
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if self._ignore_signals:
            yield
            return
        with super().capture_signals():
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and not self.should_exit:
            self._on_listening()

    def stop(self) -> None:
        """End soon; from any thread."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn raises the signal again after serving; a server that was asked to end has simply ended.
        self.stop()


class _Pipe:
    """Standard input: one line that says what to serve, then silence until the end."""

    def __init__(self) -> None:
        self._rest = b""
        self.broken = False
        """The other end is gone without having said that the child should stop."""

    def first_line(self) -> bytes:
        while b"\n" not in self._rest:
            data = os.read(0, 1 << 16)
            if not data:
                return b""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def watch(self, stop: Callable[[], None]) -> None:
        """From now on, on a thread of its own so that a busy event loop cannot miss it: the end stops the server."""
        threading.Thread(target=self._watch, args=(stop,), daemon=True, name="supervisor-pipe").start()

    def _watch(self, stop: Callable[[], None]) -> None:
        while data := os.read(0, 1 << 10):
            self._rest += data
        self.broken = not self._rest.endswith(STOP)
        stop()
        threading.Event().wait(FORCED_AFTER_S)
        end_group()


def end_group() -> None:
    """SIGKILL this process and everything that it started, if it leads its own process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _only_here(instance: str) -> None:
    # Crash tests name the server they mean; every other child of the same environment goes on.
    named = os.environ.get(crashpoints.ENVIRONMENT_VARIABLE_IN)
    if named is not None and instance not in named.split(","):
        crashpoints.arm(None)


async def _serve(start: ChildStart, pipe: _Pipe, report: Callable[[bytes], None]) -> None:
    config = start.config
    neighbours = Neighbours({name: ServerRef(name, url) for name, url in start.servers.items()})
    checkpoint = config.checkpoint_settings(start.token)
    require_root(checkpoint, config.host)
    app = build_app(config, checkpoint, neighbours)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEPALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            backlog=BACKLOG,
            lifespan="on",
        ),
        ignore_signals=start.embedded,
        on_listening=lambda: report(jsoncodec.dumps({"event": "listening"})),
    )
    pipe.watch(server.stop)
    await server.serve(sockets=[reserve(config.host, start.port)])


def main() -> None:
    """Serve until standard input ends."""
    status = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints belongs in the log

    def report(line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(status, line + b"\n")

    pipe = _Pipe()
    line = pipe.first_line()
    if not line:
        return
    start = ChildStart.model_validate_json(line)
    if start.embedded:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {start.config.instance} %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each call between servers is too much
    _only_here(start.config.instance)
    try:
        eventloop.run(_serve(start, pipe, report))
    except GymckptError as error:
        report(jsoncodec.dumps({"event": "failed", "code": error.code, "detail": error.detail, "hint": error.hint}))
        sys.exit(error.exit_code)
    except OSError as error:
        where = f"{start.config.host}:{start.port}"
        report(
            jsoncodec.dumps({"event": "failed", "code": "server_error", "detail": f"{where}: {error}", "hint": None})
        )
        sys.exit(1)
    if pipe.broken:
        end_group()


if __name__ == "__main__":
    main()
