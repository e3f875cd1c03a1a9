"""Deployments that mix our servers with those of the installed NeMo Gym, and rows for them."""

import importlib
import json
from pathlib import Path
from typing import Any

import yaml

from tests.process.deployments import Site

Server = dict[str, Any]

GYM = "gymckpt.integrations.nemo_gym.server:build"
COUNTERS = "resources_servers/example_session_state_mgmt"
ADDITIONS = 14


def gym_server(instance: str, kind: str, server: str, *, participates: bool = True, **config: Any) -> Server:
    """A server of NeMo Gym, as a participant or as it is."""
    return {
        "instance": instance,
        "kind": kind,
        "implementation": GYM,
        "start_timeout_s": 180.0,
        "options": {"server": server, "config": config},
        "checkpoint": {"enabled": participates},
    }


def worker(**options: Any) -> Server:
    """The model behind the model server."""
    return {"instance": "worker", "kind": "worker", "implementation": "tests.interop.policy:build", "options": options}


def our_environment(*transports: str, **tasksets: str) -> Server:
    options: dict[str, Any] = {"agent": "agent", "tasksets": tasksets}
    if transports:
        options["resources_tool_transports"] = list(transports)
    return {
        "instance": "environment",
        "kind": "environment",
        "implementation": "single_agent_turn",
        "options": options,
    }


def our_agent(**options: Any) -> Server:
    options = {"model": "policy_model", **options}
    return {"instance": "agent", "kind": "agent", "implementation": "simple_agent", "options": options}


def their_model(*, participates: bool = True) -> Server:
    return gym_server(
        "policy_model",
        "model",
        "responses_api_models/openai_model",
        participates=participates,
        openai_base_url="${urls.worker}/v1",
        openai_api_key="none",
        openai_model="policy",
    )


def our_model() -> Server:
    options = {"backend": "worker"}
    return {"instance": "policy_model", "kind": "model", "implementation": "policy_model", "options": options}


def their_counters(*, participates: bool = True, **config: Any) -> Server:
    return gym_server("counters", "resources", COUNTERS, participates=participates, **config)


def their_uncaptured_counters() -> Server:
    """A participant that captures none of its sessions, as every class is that nothing is declared for."""
    server = their_counters()
    server["options"]["adapter"] = "gymckpt.integrations.nemo_gym.adapters:Adapter"
    return server


def their_agent(resources: str = "counters", *, participates: bool = True) -> Server:
    return gym_server(
        "agent",
        "agent",
        "responses_api_agents/simple_agent",
        participates=participates,
        resources_server={"type": "resources_servers", "name": resources},
        model_server={"type": "responses_api_models", "name": "policy_model"},
    )


def their_environment(resources: str = "counters", *, participates: bool = True) -> Server:
    return gym_server(
        "environment",
        "environment",
        "environment_servers/single_agent_turn",
        participates=participates,
        resources_server={"type": "resources_servers", "name": resources},
        agent_server={"type": "responses_api_agents", "name": "agent"},
        resources_tool_transports=["direct_http"],
        cleanup_timeout_seconds=10,
    )


def their_relay() -> Server:
    """The environment server of Gym that hands flat rows on to its agent, as it is."""
    agent = {"type": "responses_api_agents", "name": "agent"}
    server = "environment_servers/legacy_agent"
    return gym_server("environment", "environment", server, participates=False, agent_server=agent)


class MixedSite(Site):
    """A site whose deployment file names these servers."""

    def deploy(self, *servers: Server) -> "MixedSite":
        self.root.mkdir(parents=True, exist_ok=True)
        self.config.write_text(yaml.safe_dump({"servers": list(servers)}))
        return self

    def task_file(self, rows: list[dict[str, Any]]) -> str:
        path = self.root / "tasks.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)


def example_rows(server: str) -> list[dict[str, Any]]:
    """The example rows that NeMo Gym ships with a resources server."""
    for root in importlib.import_module("resources_servers").__path__:
        path = Path(root) / server / "data" / "example.jsonl"
        if path.exists():
            return [json.loads(line) for line in path.read_text().split("\n") if line.startswith("{")]
    raise AssertionError(f"no example rows of {server} are installed")


def counter_rows(count: int) -> list[dict[str, Any]]:
    """Flat rows in the form of the shipped ones, with so many additions that there is time to kill a server. The reward
    is 1 only if each addition was made exactly once."""
    shipped = example_rows("example_session_state_mgmt")
    rows = []
    for number in range(count):
        row = json.loads(json.dumps(shipped[number % len(shipped)]))
        additions = [(number + step) % 9 + 1 for step in range(ADDITIONS)]
        row["responses_create_params"]["input"][0]["content"] = " then ".join(f"add {n}" for n in additions)
        row["expected_count"] = row["initial_count"] + sum(additions)
        rows.append(row)
    return rows


def typed(rows: list[dict[str, Any]], taskset: str) -> list[dict[str, Any]]:
    """Flat rows in the typed form."""
    return [
        {
            "task_id": {"taskset": taskset, "task_id": str(number)},
            "task_input": {
                "responses_create_params": row["responses_create_params"],
                "task_data": {name: value for name, value in row.items() if name != "responses_create_params"},
            },
        }
        for number, row in enumerate(rows)
    ]


def flat(rows: list[dict[str, Any]], agent: str = "agent") -> list[dict[str, Any]]:
    """Flat rows for one agent."""
    return [{**row, "agent_ref": {"name": agent}} for row in rows]
