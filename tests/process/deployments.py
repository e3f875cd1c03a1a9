"""Deployment files and runs for process tests: servers paced so that there is time to kill them, all calls audited."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.process.processes import GYMCKPT, CommandLine, run

TOKEN = {"GYMCKPT_CONTROL_TOKEN": "a-token-of-this-test-alone"}
START_S = 200.0
"""More than any server is given to start, so that it is the server that is named."""


def bundled(**overrides: dict[str, Any]) -> dict[str, Any]:
    """The bundled deployment as the command line prints it, with `options` of some instances changed."""
    printed = run_text("serve", "--print-config")
    deployment: dict[str, Any] = yaml.safe_load(printed)
    for server in deployment["servers"]:
        server.setdefault("options", {}).update(overrides.get(server["instance"], {}))
    return deployment


def run_text(*arguments: str) -> str:
    """What a short command prints; its exit code must be 0."""
    done = subprocess.run([*GYMCKPT, *arguments], capture_output=True, timeout=60, check=True)
    return done.stdout.decode()


@dataclass(frozen=True)
class Site:
    """One directory of a test: deployment file, audit logs, logs of the command line."""

    root: Path
    latency_s: float = 0.05

    @property
    def run_directory(self) -> Path:
        return self.root / "run"

    @property
    def config(self) -> Path:
        return self.root / "deployment.yaml"

    def audit(self, instance: str) -> Path:
        return self.root / f"audit-{instance}.jsonl"

    def prepare(self, **overrides: dict[str, Any]) -> "Site":
        """Write the deployment file."""
        self.root.mkdir(parents=True, exist_ok=True)
        audited = {name: {"audit_path": str(self.audit(name))} for name in ("workbench", "policy_model")}
        paced: dict[str, dict[str, Any]] = {**audited, "worker": {"latency_s": self.latency_s}}
        for instance, options in overrides.items():
            paced[instance] = {**paced.get(instance, {}), **options}
        self.config.write_text(yaml.safe_dump(bundled(**paced)))
        return self

    def collect(self, *arguments: str, environment: dict[str, str] | None = None) -> CommandLine:
        """`gymckpt collect ARGUMENTS --json` with embedded servers, into the run directory."""
        return CommandLine(
            "collect",
            *arguments,
            "--serve-config",
            str(self.config),
            "--run-dir",
            str(self.run_directory),
            "--json",
            environment=environment,
            log=self.root / "collect.log",
        )

    def serve(self, *arguments: str) -> CommandLine:
        """`gymckpt serve --json` with this site's deployment, once it is ready."""
        command = CommandLine(
            "serve",
            *("--config", str(self.config), "--root", str(self.root), "--log-dir", str(self.root / "logs")),
            *arguments,
            "--json",
            environment=TOKEN,
            log=self.root / "serve.log",
        )
        try:
            command.wait_event("ready", timeout_s=START_S)
        except BaseException:
            command.close()
            raise
        return command

    def collect_from(self, servers: CommandLine, *arguments: str) -> CommandLine:
        """`gymckpt collect ARGUMENTS --json` against servers that run by themselves."""
        return CommandLine(
            "collect",
            *arguments,
            *addresses(servers),
            "--run-dir",
            str(self.run_directory),
            "--json",
            environment=TOKEN,
            log=self.root / "collect.log",
        )

    def restore(self, *arguments: str, environment: dict[str, str] | None = None) -> CommandLine:
        """`gymckpt restore DIR --json`."""
        return CommandLine(
            "restore",
            str(self.run_directory),
            *arguments,
            "--json",
            environment=environment,
            log=self.root / "restore.log",
        )

    def inspect(self, *arguments: str) -> dict[str, Any]:
        """`gymckpt inspect DIR --json`."""
        found: dict[str, Any] = run("inspect", str(self.run_directory), *arguments, "--json")
        return found

    def rows(self) -> list[dict[str, Any]]:
        """The rows of rollouts.jsonl."""
        path = self.run_directory / "rollouts.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def addresses(servers: CommandLine) -> list[str]:
    """The `--url` flags for servers that are ready."""
    listed = servers.wait_event("ready")["servers"]
    pairs = [f"{server['instance']}={server['url']}" for server in listed if server["kind"] != "worker"]
    return [argument for pair in pairs for argument in ("--url", pair)]
