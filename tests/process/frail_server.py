"""A workbench that cannot export one of its sessions, as long as a file says so: `tests.process.frail_server:build`."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI

from gymckpt.jsoncodec import Json
from gymckpt.ports import SystemClock, ThreadOffload
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.resources.app import resources_app
from gymckpt.servers.resources.server import ResourcesServer
from gymckpt.servers.resources.workbench.server import Workbench, WorkbenchOptions
from gymckpt.settings import CheckpointSettings


class Frail(Workbench):
    """The file `trouble` says how; its absence that all is well."""

    checkpoint_hook_s: ClassVar[float] = 0.5
    trouble: Path
    victim: str | None = None

    async def export_session_states(self, session_ids: Sequence[str]) -> Mapping[str, Json]:
        return await ResourcesServer.export_session_states(self, session_ids)

    async def export_session_state(self, session_id: str) -> Json:
        trouble = self.trouble.read_text() if self.trouble.exists() else ""
        self.victim = self.victim or session_id
        if session_id == self.victim and trouble == "fail":
            raise RuntimeError("the state is nowhere")
        while session_id == self.victim and trouble:
            try:
                await self.hang(trouble)
            except asyncio.CancelledError:
                if trouble != "swallow":
                    raise
        return (await super().export_session_states([session_id]))[session_id]

    async def hang(self, how: str) -> None:
        if how == "threads":  # more than the event loop has
            await asyncio.gather(*(asyncio.to_thread(threading.Event().wait) for _ in range(40)))
        await asyncio.Event().wait()


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """Option `trouble`: where to look for it."""
    settings = WorkbenchOptions(audit_path=options.get("audit_path"))
    server = Frail(instance, settings, clock=SystemClock(), offload=ThreadOffload())
    server.trouble = Path(options["trouble"])
    return resources_app(server, checkpoint)
