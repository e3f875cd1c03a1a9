"""Starts the servers of a deployment, each in a process and a session of its own, keeps them up, and ends them.

Whatever ends the supervisor, SIGKILL included, closes the pipes that its children read: none outlives it. A server that
dies is started again, empty, on the same port, which a bound socket of ours holds meanwhile.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from pydantic import SecretStr

from gymckpt import crashpoints, jsoncodec
from gymckpt.errors import ServerError, UsageError
from gymckpt.ports import Clock, Deadline, ServerRef, SystemClock
from gymckpt.servers.child import STOP, ChildStart, reserve
from gymckpt.servers.deployment import Deployment, ServerConfig, ServerKind
from gymckpt.wire.client import HttpTransport

STOP_TIMEOUT_S: Final = 2.0
MAX_RESTARTS: Final = 5
RESTART_WINDOW_S: Final = 60.0
"""A server that died more than `MAX_RESTARTS` times within this is left dead."""
TOKEN_VARIABLE: Final = "GYMCKPT_CONTROL_TOKEN"  # noqa: S105 - the name, not the token
LOG_EXCERPT_BYTES: Final = 2000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers."""

    instance: str
    kind: ServerKind
    url: str
    participates: bool

    @property
    def ref(self) -> ServerRef:
        return ServerRef(self.instance, self.url)


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """Something that happened to a server after the start."""

    event: Literal["died", "restarted", "gave_up"]
    instance: str
    detail: str


@dataclass
class _Child:
    config: ServerConfig
    reserved: socket.socket
    port: int
    url: str
    process: asyncio.subprocess.Process | None = None
    starts: int = 0
    deaths_s: list[float] = field(default_factory=list)


class Supervisor:
    """An async context manager: entering starts every server and returns once all answer, leaving ends them.

    Entering raises `UsageError` for a wrong option of a server, `ServerError` for one that does not come up; then none
    is left running. With `logs`, each server appends to `<logs>/<instance>.log`; otherwise they share our stderr.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        token: SecretStr | None,
        logs: Path | None = None,
        embedded: bool = True,
        restart: bool = True,
        on_event: Callable[[ServerEvent], None] = lambda event: None,
        clock: Clock | None = None,
    ) -> None:
        self._deployment = deployment
        self._token = token
        self._logs = logs
        self._embedded = embedded
        self._restart = restart
        self._on_event = on_event
        self._clock: Clock = clock or SystemClock()
        self._children: list[_Child] = []
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def servers(self) -> tuple[RunningServer, ...]:
        """Every server, in the order of the deployment."""
        return tuple(
            RunningServer(child.config.instance, child.config.kind, child.url, child.config.participates)
            for child in self._children
        )

    def pid(self, instance: str) -> int | None:
        """The process of `instance`, None while it is not running."""
        for child in self._children:
            if child.config.instance == instance and child.process is not None and child.process.returncode is None:
                return child.process.pid
        return None

    async def __aenter__(self) -> Self:
        try:
            for config in self._deployment.servers:
                config.checkpoint_settings(self._token)
                self._children.append(_reserve(config))
            async with asyncio.TaskGroup() as group:
                for child in self._children:
                    group.create_task(self._start(child))
        except BaseException as error:
            await self._stop()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        self._keepers = [asyncio.create_task(self._keep(child)) for child in self._children]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def wait(self) -> None:
        """Return when a server died and is not started again; raises nothing."""
        await asyncio.wait(self._keepers, return_when=asyncio.FIRST_COMPLETED)

    async def _start(self, child: _Child) -> None:
        """Start the process and return once it answers; raises `UsageError`, `ServerError`."""
        start = ChildStart(
            config=child.config,
            port=child.port,
            servers={other.config.instance: other.url for other in self._children},
            embedded=self._embedded,
            token=self._token,
        )
        log = _open_log(self._logs, child.config.instance)
        try:
            process = child.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "gymckpt.servers.child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=_environment(first=child.starts == 0),
                start_new_session=True,
            )
        finally:
            if log is not None:
                os.close(log)
        child.starts += 1
        assert process.stdin is not None
        process.stdin.write(start.line())
        await self._await_listening(child, process)

    async def _await_listening(self, child: _Child, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        limit_s = child.config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                line = await process.stdout.readline()
        except TimeoutError:
            raise ServerError(f"{child.config.instance} did not start within {limit_s:g} s (start_timeout_s)") from None
        said = jsoncodec.loads(line) if line.strip() else {"event": "failed", "code": "", "detail": "it ended at once"}
        if said["event"] != "listening":
            raise self._refusal(child, said)
        async with HttpTransport(max_connections=1) as transport:
            server, deadline = ServerRef(child.config.instance, _loopback(child)), Deadline.after(self._clock, limit_s)
            reply = await transport.call(server, "GET", "/", deadline=deadline)
        if reply.status >= 500:
            raise ServerError(f"{child.config.instance} is not healthy: GET / answered HTTP {reply.status}")

    def _refusal(self, child: _Child, said: Mapping[str, Any]) -> UsageError | ServerError:
        what = f"server {child.config.instance} did not start: {said['detail']}"
        hint = said.get("hint")
        if self._logs is not None:
            line = _last_line(self._logs, child)
            if hint is None and (line or not said["code"]):
                hint = f"see {self._logs / child.config.instance}.log" + (f": {line}" if line else "")
        return UsageError(what, hint=hint) if said["code"] == "usage" else ServerError(what, hint=hint)

    async def _keep(self, child: _Child) -> None:
        """Start the server again whenever it dies; return when it is to stay dead. Each death is told once."""
        ran = True
        while True:
            assert child.process is not None
            status = await child.process.wait()
            _end_group(child.process.pid)
            if ran:
                self._say("died", child, f"{child.config.instance} died ({_how(status)})")
            if not self._restart or not await self._may_restart(child):
                self._say("gave_up", child, f"{child.config.instance} stays down")
                return
            ran = False
            try:
                await self._start(child)
            except (UsageError, ServerError, OSError) as error:
                self._say("died", child, f"{child.config.instance} did not come back: {error}")
                if child.process.returncode is None:
                    child.process.kill()
                continue
            ran = True
            self._say("restarted", child, f"{child.config.instance} runs again, empty, at {child.url}")

    async def _may_restart(self, child: _Child) -> bool:
        now_s = self._clock.monotonic()
        child.deaths_s = [at_s for at_s in child.deaths_s if now_s - at_s < RESTART_WINDOW_S] + [now_s]
        if len(child.deaths_s) > MAX_RESTARTS:
            return False
        await self._clock.sleep_until(now_s + 0.05 * 4 ** (len(child.deaths_s) - 1))
        return True

    def _say(self, event: Literal["died", "restarted", "gave_up"], child: _Child, detail: str) -> None:
        _log.log(logging.INFO if event == "restarted" else logging.WARNING, "%s", detail)
        self._on_event(ServerEvent(event, child.config.instance, detail))

    async def _stop(self) -> None:
        # The keepers first: none may start a server again while the others end.
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(_end(child.process) for child in self._children if child.process is not None))
        for child in self._children:
            child.reserved.close()


def _reserve(config: ServerConfig) -> _Child:
    try:
        reserved = reserve(config.host, config.port)
    except OSError as error:
        raise ServerError(
            f"{config.instance} cannot have {config.host}:{config.port}: {error.strerror}",
            hint="another process listens there; choose another port, or 0 for a free one",
        ) from error
    port = int(reserved.getsockname()[1])
    return _Child(config, reserved, port, config.url(port))


def _loopback(child: _Child) -> str:
    # The health check goes where the server listens, whatever name others use for it.
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(child.config.host)  # noqa: S104
    return f"http://{host}:{child.port}" if host else child.url


def _environment(*, first: bool) -> dict[str, str]:
    unwanted = {TOKEN_VARIABLE} if first else {TOKEN_VARIABLE, crashpoints.ENVIRONMENT_VARIABLE}
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def _open_log(logs: Path | None, instance: str) -> int | None:
    if logs is None:
        return None
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(logs / f"{instance}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _last_line(logs: Path, child: _Child) -> str:
    data = (logs / f"{child.config.instance}.log").read_bytes()[-LOG_EXCERPT_BYTES:]
    lines = data.decode("utf-8", "replace").strip().split("\n")
    return lines[-1][:300]


def _how(status: int) -> str:
    if status >= 0:
        return f"exit {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def _end_group(pid: int) -> None:
    # The child led a session of its own: what it left behind goes with it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(STOP)
            process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    _end_group(process.pid)
