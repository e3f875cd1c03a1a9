"""The workbench: an office and its warehouses, one database for each session, captured as the database's own bytes."""

import asyncio
import base64
import binascii
import functools
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from gymckpt.errors import UnknownSession
from gymckpt.identity import EpisodeId
from gymckpt.jsoncodec import Json
from gymckpt.ports import Clock, Offload
from gymckpt.roles.audit import AuditLog
from gymckpt.roles.resources_hooks import SessionStateError
from gymckpt.servers.resources.server import Call, ResourcesServer, Seed, Tool, Verification
from gymckpt.servers.resources.tool_schema import ToolDescription
from gymckpt.servers.resources.workbench.database import MAX_DATABASE_BYTES, new_database, open_database
from gymckpt.servers.resources.workbench.tools import TOOL_NAMES, run_tool
from gymckpt.servers.resources.workbench.verifier import office_of, verdict
from gymckpt.settings import Settings
from gymckpt.tasksets.workbench_tools import WORKBENCH_TOOLS
from gymckpt.wire.control import ResourcesMode, VerifyMode

T = TypeVar("T")


class WorkbenchOptions(Settings):
    """What a workbench can be told."""

    tool_latency_s: float = Field(default=0.0, ge=0.0, le=3600.0)
    """Every call takes this much longer."""
    audit_path: Path | None = None
    """Where a line is written before each call."""
    expose_tools_over_mcp: bool = False
    """Serve the tools at `/mcp` too (extra `gymckpt[mcp]`)."""


_DESCRIBED = {t["name"]: ToolDescription(t["description"], t["parameters"]) for t in WORKBENCH_TOOLS}


@dataclass(eq=False, slots=True)
class _Desk:
    database: sqlite3.Connection
    episode: EpisodeId | None = None
    calls: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Workbench(ResourcesServer):
    """Twenty-one tools over SQLite; the reward is 1 if the database ends as the reference solution leaves it."""

    checkpoint_mode: ClassVar[ResourcesMode] = "exported"
    checkpoint_verify: ClassVar[VerifyMode] = "wait"

    def __init__(self, instance: str, options: WorkbenchOptions, *, clock: Clock, offload: Offload) -> None:
        super().__init__(instance)
        self._options = options
        self._clock = clock
        self._offload = offload
        self._audit = AuditLog(options.audit_path, instance, clock, offload) if options.audit_path else None
        self._desks: dict[str, _Desk] = {}

    async def shutdown(self) -> None:
        """Close every database, and the audit log."""
        for session_id in list(self._desks):
            await self.retire_session_state(session_id)
        if self._audit is not None:
            self._audit.close()

    async def seed_session(self, seed: Seed) -> None:
        """A fresh office."""
        database = await self._offload.run(functools.partial(new_database, office_of(seed.task_data)))
        self._desks[seed.session_id] = _Desk(database, seed.episode)

    def tools(self) -> Mapping[str, Tool]:
        """All of `workbench_tools`."""
        return {name: self._tool(name) for name in TOOL_NAMES}

    def describe_tool(self, name: str, tool: Tool) -> ToolDescription:
        """As `workbench_tools` describes it to a model."""
        return _DESCRIBED[name]

    def _tool(self, name: str) -> Tool:
        async def run(call: Call, **arguments: Any) -> Json:
            desk = self._desk(call.session_id)
            async with desk.lock:
                desk.calls += 1
                if self._audit is not None:
                    await self._audit.record(call.episode or desk.episode, desk.calls, tool=name)
                if self._options.tool_latency_s:
                    await self._clock.sleep_until(self._clock.monotonic() + self._options.tool_latency_s)
                return await self._work(lambda: run_tool(desk.database, name, arguments))

        return run

    async def verify(self, verification: Verification) -> dict[str, Any]:
        """See `verifier.verdict`."""
        desk = self._desk(verification.session_id)
        async with desk.lock:
            return await self._work(lambda: verdict(desk.database, verification.body))

    async def export_session_states(self, session_ids: Sequence[str]) -> Mapping[str, Json]:
        """`{"database": base64 of the database's own bytes, "calls": index of the last call}`, one job a batch."""
        desks = {id_: self._desks[id_] for id_ in session_ids if id_ in self._desks}
        return await self._offload.run(lambda: {id_: _state(desk) for id_, desk in desks.items()})

    async def validate_session_states(self, states: Mapping[str, Json]) -> None:
        """Open each database once, to see that it is one."""

        def check() -> None:
            for session_id, state in states.items():
                _open(session_id, state).database.close()

        await self._offload.run(check)

    async def restore_session_states(self, states: Mapping[str, Json]) -> None:
        """A desk for each."""
        self._desks.update(
            await self._offload.run(
                lambda: {session_id: _open(session_id, state) for session_id, state in states.items()}
            )
        )

    async def retire_session_state(self, session_id: str) -> None:
        """Close the session's database."""
        desk = self._desks.pop(session_id, None)
        if desk is not None:
            async with desk.lock:
                desk.database.close()

    def _desk(self, session_id: str | None) -> _Desk:
        desk = self._desks.get(session_id or "")
        if desk is None:
            raise UnknownSession(f"{self.instance} does not hold session {session_id!r}")
        return desk

    async def _work(self, work: Callable[[], T]) -> T:
        # A cancelled call keeps its desk locked until its thread has left the database.
        running = asyncio.ensure_future(self._offload.run(work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise


def _state(desk: _Desk) -> Json:
    return {"database": base64.b64encode(desk.database.serialize()).decode("ascii"), "calls": desk.calls}


def _open(session_id: str, state: Json) -> _Desk:
    try:
        encoded, calls = state["database"], state["calls"]
        if not isinstance(calls, int) or calls < 0 or len(encoded) > MAX_DATABASE_BYTES * 4 // 3 + 4:
            raise ValueError("its numbers make no sense")
        return _Desk(open_database(base64.b64decode(encoded, validate=True)), calls=calls)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise SessionStateError(f"session {session_id}: {error}") from error
