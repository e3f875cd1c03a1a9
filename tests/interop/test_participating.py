"""The documented way: a start script of a few lines, run as Gym runs its servers."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import yaml

pytestmark = pytest.mark.interop

SCRIPT = """
from resources_servers.{folder}.app import {name}

from gymckpt.integrations.nemo_gym import participating

if __name__ == "__main__":
    participating({name}).run_webserver()
"""
BLACKJACK = ("blackjack", "BlackjackEnv")
COUNTERS = ("example_session_state_mgmt", "StatefulCounterResourcesServer")
STATUS = "/ng-control/v1/checkpoint/status"
LISTENING = b"Uvicorn running on"
TOKEN = "a-token-of-this-test-alone"


@contextmanager
def started(
    folder: Path, block: dict[str, Any], server: tuple[str, str] = BLACKJACK, **environment: str
) -> Iterator[httpx.Client]:
    """The start script as a process, configured as Gym hands its configuration to a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"entrypoint": "participant.py", "domain": "games", "host": "127.0.0.1", "port": port, **block}
    configuration = {
        "table": {"resources_servers": {server[0]: own}},
        "head_server": {"host": "127.0.0.1", "port": 1},
        "dry_run": False,
    }
    script = folder / "participant.py"
    script.write_text(SCRIPT.format(folder=server[0], name=server[1]))
    variables = {
        "NEMO_GYM_CONFIG_DICT": yaml.safe_dump(configuration),
        "NEMO_GYM_CONFIG_PATH": "table",
        **environment,
    }
    said: list[bytes] = []
    listening = threading.Event()

    def read(output: IO[bytes]) -> None:
        for line in output:
            said.append(line)
            if LISTENING in line:
                listening.set()
        listening.set()  # it ended

    with subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
    ) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=read, args=(process.stdout,))
        reader.start()
        try:
            assert listening.wait(120)
            assert any(LISTENING in line for line in said), b"".join(said)[-4000:].decode(errors="replace")
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
                yield client
        finally:
            process.kill()
            reader.join()


def test_a_checkpoint_block_makes_the_server_a_participant(tmp_path: Path) -> None:
    block = {"checkpoint": {"enabled": True, "control_auth_token": TOKEN, "root": str(tmp_path)}}
    with started(tmp_path, block) as client:
        assert client.get(STATUS).status_code == 401
        status = client.get(STATUS, headers={"authorization": f"Bearer {TOKEN}"}).json()
        assert (status["kind"], status["instance"], status["mode"]) == ("resources", "table", "exported")
        reset = client.post("/reset", json={"responses_create_params": {"input": "Deal me in."}})
        assert reset.status_code == 200
        assert list(reset.cookies) == ["BlackjackEnv___table"]
        assert reset.headers["x-ng-checkpoint-restart"] == "1"  # no episode was named, so no checkpoint can name it


def test_the_environment_does_the_same_and_tools_over_mcp_stay(tmp_path: Path) -> None:
    with started(tmp_path, {"expose_tools_over_mcp": True}, COUNTERS, GYMCKPT_CONTROL_TOKEN=TOKEN) as client:
        status = client.get(STATUS, headers={"authorization": f"Bearer {TOKEN}"}).json()
        assert (status["phase"], status["mode"]) == ("idle", "exported")
        assert "mcp_access" in status["extensions"]
        assert client.post("/seed_session", json={"initial_count": 3}).json()["mcp"]["url_path"] == "/mcp"


def test_without_either_the_server_is_what_it_was(tmp_path: Path) -> None:
    with started(tmp_path, {}) as client:
        assert client.get(STATUS).status_code == 404
        reset = client.post("/reset", json={"responses_create_params": {"input": "Deal me in."}})
        assert reset.status_code == 200
        assert not [name for name in reset.headers if name.startswith("x-ng-checkpoint")]
        assert json.loads(reset.content)["observation"]
