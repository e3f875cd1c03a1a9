"""`shell`: a live subprocess in every session. Nothing of it can be captured, and it says so."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymckpt.errors import UnknownSession, UsageError
from gymckpt.identity import EpisodeId
from gymckpt.jsoncodec import Json
from gymckpt.ports import Clock, Offload, SystemClock, ThreadOffload
from gymckpt.roles.audit import AuditLog
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.resources.app import resources_app
from gymckpt.servers.resources.options import read_options
from gymckpt.servers.resources.server import Call, ResourcesServer, Seed, Verification, tool
from gymckpt.servers.resources.shell_process import ShellProcess
from gymckpt.settings import CheckpointSettings, Settings
from gymckpt.wire.control import ResourcesMode

MAX_LINE_BYTES = 64 << 10


class ShellData(BaseModel):
    """The fields of a task that this server reads."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    file: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    expected_text: str = Field(max_length=1 << 16)


class ShellOptions(Settings):
    """What a shell server can be told."""

    line_timeout_s: float = Field(default=30.0, gt=0.0, le=3600.0)
    """A line that takes longer ends its session's shell."""
    audit_path: Path | None = None
    """Where a line is written before each call."""
    expose_tools_over_mcp: bool = False
    """Serve the tools at `/mcp` too (extra `gymckpt[mcp]`)."""


@dataclass(eq=False, slots=True)
class _Terminal:
    shell: ShellProcess
    episode: EpisodeId | None
    calls: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Shell(ResourcesServer):
    """The reward is 1 if the live shell holds the expected total, in its variable and in the file."""

    checkpoint_mode: ClassVar[ResourcesMode] = "restart_only"

    def __init__(self, instance: str, options: ShellOptions, *, clock: Clock, offload: Offload) -> None:
        super().__init__(instance)
        self._options = options
        self._offload = offload
        self._audit = AuditLog(options.audit_path, instance, clock, offload) if options.audit_path else None
        self._terminals: dict[str, _Terminal] = {}

    async def shutdown(self) -> None:
        """Kill every shell, and close the audit log."""
        for session_id in list(self._terminals):
            await self.retire_session_state(session_id)
        if self._audit is not None:
            self._audit.close()

    async def seed_session(self, seed: Seed) -> None:
        """Start a shell."""
        self._terminals[seed.session_id] = _Terminal(await ShellProcess.start(self._offload), seed.episode)

    @tool
    async def run_line(self, call: Call, *, line: str) -> Json:
        """Run one line; the output and exit status are the answer."""
        terminal = self._terminal(call.session_id)
        if not isinstance(line, str) or len(line) > MAX_LINE_BYTES or "\0" in line:
            return {"error": f"line is not a text of at most {MAX_LINE_BYTES} characters"}
        async with terminal.lock:
            terminal.calls += 1
            if self._audit is not None:
                episode = call.episode or terminal.episode
                await self._audit.record(episode, terminal.calls, tool="run_line")
            ran = await terminal.shell.run(line, self._options.line_timeout_s)
        if ran.status is None:
            return {"output": ran.output, "error": "the shell has ended"}
        return {"output": ran.output, "status": ran.status}

    async def verify(self, verification: Verification) -> dict[str, Any]:
        """Ask the shell itself."""
        try:
            data = ShellData.model_validate(verification.body)
        except ValidationError as error:
            raise UsageError(f"the task's data: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
        terminal = self._terminal(verification.session_id)
        async with terminal.lock:
            said = await terminal.shell.run(f'printf "%s " "$total"; cat {data.file}', self._options.line_timeout_s)
        right = said.status == 0 and said.output.split() == [data.expected_text] * 2
        return {"reward": 1.0 if right else 0.0, "found": said.output[:200]}

    async def retire_session_state(self, session_id: str) -> None:
        """Kill the session's shell."""
        terminal = self._terminals.pop(session_id, None)
        if terminal is not None:
            await terminal.shell.kill()

    def _terminal(self, session_id: str | None) -> _Terminal:
        terminal = self._terminals.get(session_id or "")
        if terminal is None:
            raise UnknownSession(f"{self.instance} does not hold session {session_id!r}")
        return terminal


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """See `servers.registry.Builder`; options are `ShellOptions`."""
    clock, offload = SystemClock(), ThreadOffload()
    settings = read_options(ShellOptions, instance, options)
    server = Shell(instance, settings, clock=clock, offload=offload)
    exposed = settings.expose_tools_over_mcp
    return resources_app(server, checkpoint, clock=clock, offload=offload, expose_tools_over_mcp=exposed)
