"""The supervisor with real processes and real sockets."""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gymckpt.errors import ServerError, UsageError
from gymckpt.servers.deployment import CheckpointBlock, Deployment, ServerConfig
from gymckpt.servers.supervisor import ServerEvent, Supervisor

HERE = Path(__file__).parent
TOKEN = SecretStr("a-token-for-tests")


@pytest.fixture(autouse=True)
def _samples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("GYMCKPT_CONTROL_TOKEN", TOKEN.get_secret_value())


def _deployment(*names: str, **options: Any) -> Deployment:
    return Deployment(
        servers=tuple(
            ServerConfig(
                instance=name, kind="resources", implementation="sample_server:build", port=0, options=dict(options)
            )
            for name in names
        )
    )


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


def _gone(pid: int) -> None:
    """Return once the process has ended; the test's own time limit bounds the wait."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)


def _with(supervisor: Supervisor, body: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with supervisor:
            return await body()

    return asyncio.run(run())


def test_every_server_knows_the_others_and_gets_the_token_by_pipe_only(tmp_path: Path) -> None:
    supervisor = Supervisor(_deployment("left", "right"), token=TOKEN, logs=tmp_path / "servers")

    async def look() -> tuple[dict[str, str], Any]:
        urls = {server.instance: server.url for server in supervisor.servers}
        return urls, await asyncio.to_thread(_get, urls["left"] + "/self")

    urls, seen = _with(supervisor, look)
    assert seen["neighbours"] == urls
    assert seen["token"] == TOKEN.get_secret_value()
    assert "GYMCKPT_CONTROL_TOKEN" not in seen["environment"]
    assert not any(TOKEN.get_secret_value() in argument for argument in seen["arguments"])
    logs = sorted((tmp_path / "servers").iterdir())
    assert [log.name for log in logs] == ["left.log", "right.log"]
    assert all(log.stat().st_mode & 0o777 == 0o600 for log in logs)
    assert not any(TOKEN.get_secret_value() in log.read_text() for log in logs)


def test_leaving_ends_every_server_and_what_it_started() -> None:
    supervisor = Supervisor(_deployment("one", helper=True), token=TOKEN)

    async def look() -> Any:
        return await asyncio.to_thread(_get, supervisor.servers[0].url + "/self")

    seen = _with(supervisor, look)
    _gone(seen["pid"])
    _gone(seen["helper"])


def test_a_dead_server_is_started_again_on_the_same_port() -> None:
    events: asyncio.Queue[ServerEvent] = asyncio.Queue()
    supervisor = Supervisor(_deployment("one"), token=TOKEN, on_event=events.put_nowait)

    async def kill() -> tuple[Any, Any]:
        url = supervisor.servers[0].url + "/self"
        before = await asyncio.to_thread(_get, url)
        os.kill(before["pid"], signal.SIGKILL)
        assert (await events.get()).event == "died"
        assert (await events.get()).event == "restarted"
        return before, await asyncio.to_thread(_get, url)

    before, after = _with(supervisor, kill)
    assert after["instance"] == before["instance"]
    assert after["pid"] != before["pid"]


def test_a_server_that_cannot_be_started_again_at_first_has_its_death_told_once(tmp_path: Path) -> None:
    events: asyncio.Queue[ServerEvent] = asyncio.Queue()
    mark = tmp_path / "crash"
    supervisor = Supervisor(_deployment("one", crash_while=str(mark)), token=TOKEN, on_event=events.put_nowait)

    async def kill() -> list[str]:
        pid = supervisor.pid("one")
        assert pid is not None
        mark.touch()
        os.kill(pid, signal.SIGKILL)
        told = [(await events.get()).detail, (await events.get()).detail]
        mark.unlink()
        while (event := await events.get()).event != "restarted":
            told.append(event.detail)
        return told

    first, *others = _with(supervisor, kill)
    assert first == "one died (SIGKILL)"
    assert others
    assert all(detail.startswith("one did not come back: ") for detail in others)


def test_without_restart_a_dead_server_refuses_connections_and_the_supervisor_says_so() -> None:
    events: list[ServerEvent] = []
    supervisor = Supervisor(_deployment("one"), token=TOKEN, restart=False, on_event=events.append)

    async def kill() -> None:
        pid = supervisor.pid("one")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await supervisor.wait()
        with pytest.raises(urllib.error.URLError, match="refused"):
            await asyncio.to_thread(_get, supervisor.servers[0].url)

    _with(supervisor, kill)
    assert [event.event for event in events] == ["died", "gave_up"]
    assert "SIGKILL" in events[0].detail


def test_an_embedded_server_ignores_term_and_int() -> None:
    supervisor = Supervisor(_deployment("one"), token=TOKEN)

    async def poke() -> tuple[int | None, Any]:
        pid = supervisor.pid("one")
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        return pid, await asyncio.to_thread(_get, supervisor.servers[0].url + "/self")

    pid, seen = _with(supervisor, poke)
    assert seen["pid"] == pid
    assert os.getsid(0) != pid


def test_a_wrong_option_is_the_users_error_and_leaves_nothing_running(tmp_path: Path) -> None:
    servers = (*_deployment("good").servers, *_deployment("bad", refuse="nonsense").servers)
    supervisor = Supervisor(Deployment(servers=servers), token=TOKEN, logs=tmp_path)

    async def never() -> None:
        raise AssertionError("it came up")

    with pytest.raises(UsageError, match=r"server bad did not start: option refuse: nonsense") as caught:
        _with(supervisor, never)
    assert caught.value.hint == "leave it out"
    assert supervisor.pid("good") is None
    assert supervisor.pid("bad") is None


def test_a_server_that_ends_at_its_start_is_named_with_its_log(tmp_path: Path) -> None:
    supervisor = Supervisor(_deployment("bad", crash=True), token=TOKEN, logs=tmp_path)

    async def never() -> None:
        raise AssertionError("it came up")

    with pytest.raises(ServerError, match="server bad did not start") as caught:
        _with(supervisor, never)
    assert caught.value.hint == f"see {tmp_path / 'bad'}.log"


def test_a_server_that_does_not_listen_within_its_time_is_named() -> None:
    [hanging] = _deployment("slow", hang=True).servers
    deployment = Deployment(servers=(hanging.model_copy(update={"start_timeout_s": 0.5}),))
    with pytest.raises(ServerError, match=r"slow did not start within 0\.5 s \(start_timeout_s\)"):
        _with(Supervisor(deployment, token=TOKEN), lambda: asyncio.sleep(0))


def test_a_taken_port_is_named() -> None:
    async def start(port: int) -> None:
        config = _deployment("one").servers[0].model_copy(update={"port": port})
        async with Supervisor(Deployment(servers=(config,)), token=TOKEN):
            raise AssertionError("it came up")

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = int(other.getsockname()[1])
        with pytest.raises(ServerError, match=f"one cannot have 127.0.0.1:{taken}"):
            asyncio.run(start(taken))


def test_participants_without_a_token_are_refused_before_any_process_starts() -> None:
    config = ServerConfig(
        instance="one",
        kind="resources",
        implementation="sample_server:build",
        port=0,
        checkpoint=CheckpointBlock(lease_grace_seconds=5.0),
    )
    supervisor = Supervisor(Deployment(servers=(config,)), token=None)

    async def never() -> None:
        raise AssertionError("it came up")

    with pytest.raises(UsageError, match="control_auth_token"):
        _with(supervisor, never)
    assert supervisor.servers == ()


SCRIPT = """
import asyncio, json, sys
from pydantic import SecretStr
from gymckpt.servers.deployment import Deployment, ServerConfig
from gymckpt.servers.supervisor import Supervisor

async def main():
    config = ServerConfig(instance="one", kind="resources", implementation="sample_server:build", options={"helper": 1})
    async with Supervisor(Deployment(servers=(config,)), token=SecretStr("t")) as supervisor:
        print(supervisor.servers[0].url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_supervisor_leaves_no_orphan() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        seen = _get(url + "/self")
        process.kill()
    _gone(seen["pid"])
    _gone(seen["helper"])
    with pytest.raises(urllib.error.URLError, match="refused"):
        _get(url)
