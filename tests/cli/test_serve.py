"""`gymckpt serve` with real processes."""

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from commands import embedded
from commands.serve import chosen_deployment
from gymckpt.collection.settings import CollectSettings
from gymckpt.ports import ServerRef
from gymckpt.servers.deployment import Deployment, Neighbours, bundled_deployment
from gymckpt.servers.registry import build_app
from gymckpt.settings import CheckpointSettings
from tests.cli.terminal import GYMCKPT, environment, gymckpt

SAMPLES = Path(__file__).resolve().parents[1] / "servers"
TOKEN = "a-token-for-tests"


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    servers = [
        {"instance": "one", "kind": "resources", "implementation": "sample_server:build"},
        {"instance": "two", "kind": "worker", "implementation": "sample_server:build"},
    ]
    path.write_text(yaml.safe_dump({"servers": servers}))
    return path


@contextmanager
def _serving(directory: Path, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    with subprocess.Popen(
        [*GYMCKPT, "serve", "--json", *arguments],
        cwd=directory,
        env=environment({"GYMCKPT_CONTROL_TOKEN": TOKEN, "PYTHONPATH": str(SAMPLES)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


def test_ready_names_every_server_and_they_answer(tmp_path: Path, deployment: Path) -> None:
    with _serving(tmp_path, "--config", str(deployment)) as (process, ready):
        assert ready["event"] == "ready"
        assert [(server["kind"], server["instance"]) for server in ready["servers"]] == [
            ("resources", "one"),
            ("worker", "two"),
        ]
        seen = [_get(server["url"] + "/self") for server in ready["servers"]]
        assert {server["token"] for server in seen} == {TOKEN}
        for pid in (process.pid, *(server["pid"] for server in seen)):
            assert TOKEN.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert sorted(path.name for path in (tmp_path / "servers").iterdir()) == ["one.log", "two.log"]


def test_a_server_that_was_killed_is_back_on_its_port(tmp_path: Path, deployment: Path) -> None:
    with _serving(tmp_path, "--config", str(deployment)) as (process, ready):
        assert process.stdout is not None
        url = ready["servers"][0]["url"] + "/self"
        first = _get(url)
        os.kill(first["pid"], signal.SIGKILL)
        events = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [(event["event"], event["instance"]) for event in events] == [("died", "one"), ("restarted", "one")]
        assert _get(url)["pid"] != first["pid"]


def test_without_restart_a_killed_server_stays_dead_and_the_others_live(tmp_path: Path, deployment: Path) -> None:
    with _serving(tmp_path, "--config", str(deployment), "--no-restart") as (process, ready):
        assert process.stdout is not None
        one, two = (server["url"] + "/self" for server in ready["servers"])
        os.kill(_get(one)["pid"], signal.SIGKILL)
        events = [json.loads(process.stdout.readline())["event"] for _ in range(2)]
        assert events == ["died", "gave_up"]
        with pytest.raises(urllib.error.URLError, match="refused"):
            _get(one)
        assert _get(two)["instance"] == "two"


def test_serving_without_a_token_says_how_to_give_one(deployment: Path, tmp_path: Path) -> None:
    done = gymckpt("serve", "--config", str(deployment), cwd=tmp_path)
    assert done.returncode == 2
    assert "GYMCKPT_CONTROL_TOKEN" in done.stderr
    assert "--control-token-file" in done.stderr


def test_the_printed_deployment_can_be_served_again(tmp_path: Path) -> None:
    printed = gymckpt("serve", "--print-config", "--port", "agent=18123", "--lease", "7.5").stdout
    read = Deployment.model_validate(yaml.safe_load(printed))
    assert [server.instance for server in read.servers] == [s.instance for s in bundled_deployment().servers]
    assert read.server("agent").port == 18123
    assert all(server.checkpoint.lease_grace_seconds == 7.5 for server in read.servers)


@pytest.mark.parametrize(
    "deployment",
    [
        chosen_deployment(None, backend_url="http://backend/v1", model="policy"),
        embedded.chosen(CollectSettings(serve=True, backend_url="http://backend/v1", model="policy")),
    ],
    ids=["serve", "collect"],
)
def test_every_server_understands_the_options_that_flags_give_it(deployment: Deployment) -> None:
    neighbours = Neighbours({s.instance: ServerRef(s.instance, f"http://{s.instance}") for s in deployment.servers})
    for server in deployment.servers:
        build_app(server, CheckpointSettings(), neighbours)
    assert deployment.server("policy_model").options["backend_urls"] == ["http://backend/v1"]


def test_a_backend_that_is_no_url_is_refused() -> None:
    done = gymckpt("serve", "--print-config", "--backend-url", "backend:8000")
    assert done.returncode == 2
    assert "'backend:8000' is not an http(s) URL" in done.stderr


def test_only_the_servers_that_a_task_set_needs() -> None:
    printed = gymckpt("serve", "--print-config", "--taskset", "@answers").stdout
    instances = [server["instance"] for server in yaml.safe_load(printed)["servers"]]
    assert instances == ["environment", "agent", "policy_model", "worker", "answer_match"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("servers: []", "servers"),
        ("servers: [{instance: a, kind: agent, implementation: nonsense}]", "unknown implementation"),
        ("servers: [{instance: ../a, kind: agent, implementation: shell}]", "instance"),
        ("servers: [{instance: a, kind: agent, implementation: shell, prot: 1}]", "prot"),
        ("servers: [", "no YAML"),
    ],
)
def test_a_wrong_deployment_file_is_one_message_with_the_field(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    done = gymckpt("serve", "--print-config", "--config", str(path))
    assert done.returncode == 2
    assert named in done.stderr
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr
