"""A deployment whose servers all live in one process, and die with it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from gymckpt.servers.child import reserve
from tests.interop.held import HOLD
from tests.interop.mixes import MixedSite, Server
from tests.process.deployments import TOKEN
from tests.process.processes import CommandLine, descendants, wait_gone

HERE = Path(__file__).parents[2]


class Host:
    """The process; `start` again after `kill` gives empty servers at the same addresses."""

    def __init__(self, site: MixedSite, servers: list[Server]) -> None:
        self.site = site
        self.hold = site.root / "hold"
        reserved = [reserve("127.0.0.1", 0) for _ in servers]
        self.deployment = {
            "servers": [{**one, "port": held.getsockname()[1]} for one, held in zip(servers, reserved, strict=True)]
        }
        for held in reserved:
            held.close()
        site.root.mkdir(parents=True, exist_ok=True)
        site.config.write_text(yaml.safe_dump(self.deployment))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **TOKEN, "PYTHONPATH": str(HERE), HOLD: str(self.hold)}

    def start(self) -> None:
        """Return once every server listens."""
        log = self.site.root / "host.log"
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.interop.host", str(self.site.config)],
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self.site.root,
                env=self.environment,
            )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b'{"event": "ready"'):
                return
        raise AssertionError(f"the servers did not start:\n{log.read_text(errors='replace')[-4000:]}")

    def kill(self) -> None:
        """SIGKILL all servers and whatever they started; safe to repeat."""
        if self._process is not None:
            everyone = descendants(self._process.pid)
            for pid in everyone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
            wait_gone(everyone)
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    def addresses(self) -> list[str]:
        """The `--url` flags for them."""
        found = []
        for one in self.deployment["servers"]:
            if one["kind"] != "worker":
                found += ["--url", f"{one['instance']}=http://127.0.0.1:{one['port']}"]
        return found

    def collect(self, tasks: str, run: Path, *arguments: str, **environment: str) -> CommandLine:
        return CommandLine(
            "collect",
            *(tasks, *self.addresses(), "--run-dir", str(run), "--json", *arguments),
            environment={**TOKEN, **environment},
            log=self.site.root / "collect.log",
        )

    def restore(self, run: Path) -> CommandLine:
        return CommandLine(
            "restore",
            *(str(run), *self.addresses(), "--json"),
            environment=TOKEN,
            log=self.site.root / "restore.log",
        )


def rows_of(run: Path) -> dict[int, Any]:
    """Rows of rollouts.jsonl by task; fails if one task has two."""
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().split("\n") if line]
    found = {row["_ng_task_index"]: row for row in rows}
    assert len(found) == len(rows)
    return found
