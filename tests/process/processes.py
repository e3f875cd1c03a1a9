"""Real processes under test: start the command line, read its JSON lines, find and kill everything it started."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

GYMCKPT = [sys.executable, "-m", "gymckpt.commands"]


class Ended(AssertionError):
    """The process ended, or its time ran out, before the awaited line came."""


def descendants(pid: int) -> list[int]:
    """Every live process that descends from `pid`, itself first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended while we looked
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for process in found:
        found.extend(parents.get(process, ()))
    return found


def wait_gone(pids: Sequence[int], timeout_s: float = 10.0) -> None:
    """Return once none of `pids` runs any more (zombies count as gone)."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(descriptor, selectors.EVENT_READ)
                assert selector.select(max(0.0, deadline - time.monotonic())), f"process {pid} is still there"
        finally:
            os.close(descriptor)


class CommandLine:
    """One run of the command line with `--json`; `events` collects what it printed so far."""

    def __init__(
        self, *arguments: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None, log: Path
    ) -> None:
        self.arguments = arguments
        self.log = log
        self.events: list[dict[str, Any]] = []
        self._buffer = b""
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*GYMCKPT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=cwd,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        assert self.process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.process.stdout, selectors.EVENT_READ)

    def _read(self, timeout_s: float) -> bool:
        """Take in what stdout has within `timeout_s`; False at its end."""
        if not self._selector.select(timeout_s):
            return True
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self.events.extend(json.loads(line) for line in lines)
        return bool(data)

    def wait_until(self, reached: Callable[[], bool], timeout_s: float = 90.0) -> None:
        """Read events until `reached()`; it is asked after every read, and every 20 ms for what shows only in files."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            if time.monotonic() > deadline:
                raise Ended(f"{self.arguments}: not reached in {timeout_s} s\n{self.describe()}")
            if not self._read(0.02) and not reached():
                raise Ended(f"{self.arguments}: ended with {self.process.wait()}\n{self.describe()}")

    def wait_event(
        self, name: str, matches: Callable[[dict[str, Any]], bool] = lambda event: True, timeout_s: float = 90.0
    ) -> dict[str, Any]:
        """The first event `name` that `matches` from now on (or already read)."""
        found: list[dict[str, Any]] = []

        def reached() -> bool:
            found.extend(event for event in self.events if event["event"] == name and matches(event))
            return bool(found)

        self.wait_until(reached, timeout_s)
        return found[0]

    def wait_checkpoint(self, good: Callable[[], bool]) -> bool:
        """Ask `good` after every published checkpoint until it says yes; False if the run was done before."""
        asked = 0

        def reached() -> bool:
            nonlocal asked
            published = sum(event["event"] == "checkpoint" for event in self.events)
            if published > asked:
                asked = published
                return good()
            return self.done

        self.wait_until(reached)
        return not self.done

    @property
    def done(self) -> bool:
        """Whether it printed its last event."""
        return bool(self.events) and self.events[-1]["event"] == "done"

    def finish(self, timeout_s: float = 150.0) -> int:
        """Read to the end and give the exit code. However it ends, it says so in messages, without a traceback."""
        deadline = time.monotonic() + timeout_s
        while self._read(max(0.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                raise Ended(f"{self.arguments}: still running after {timeout_s} s\n{self.describe()}")
        code = self.process.wait(timeout=20)
        assert "Traceback" not in self.log.read_text(errors="replace"), self.describe()
        return code

    def kill_everything(self) -> None:
        """SIGKILL to the collector, its servers and whatever else it started, all stopped first so that none reacts."""
        everyone = descendants(self.process.pid)
        self._signal(everyone, signal.SIGSTOP)
        everyone = descendants(self.process.pid)
        self._signal(everyone, signal.SIGKILL)
        self.process.wait(timeout=20)
        wait_gone(everyone)

    def kill_alone(self) -> None:
        """SIGKILL to this process only."""
        self.process.kill()
        self.process.wait(timeout=20)

    @staticmethod
    def _signal(pids: Sequence[int], number: int) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def describe(self) -> str:
        """The end of what it printed, for a failed assertion."""
        errors = self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""
        return "\n".join(json.dumps(event) for event in self.events[-15:]) + "\n--- stderr\n" + errors

    def close(self) -> None:
        """Leave nothing running."""
        if self.process.poll() is None:
            self.kill_everything()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._selector.close()


def run(*arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> Any:
    """Run one short command with `--json` in `arguments`; its exit code must be 0. Gives what it printed."""
    done = subprocess.run(
        [*GYMCKPT, *arguments],
        capture_output=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    assert done.returncode == 0, (arguments, done.returncode, done.stderr.decode()[-2000:])
    return json.loads(done.stdout)
