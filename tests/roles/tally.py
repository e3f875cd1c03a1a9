"""A resources server that adds up, and ways to seed and call it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from gymckpt.identity import EpisodeId
from gymckpt.jsoncodec import Json
from gymckpt.ports import Reply
from gymckpt.servers.resources.server import Call, ResourcesServer, Seed, SessionLost, Verification, tool
from gymckpt.wire.control import ResourcesMode, VerifyMode
from tests.servers.resources_desk import Caller, Desk, value

T = TypeVar("T")

X, Y, Z = "ckpt-000001-0000000a", "ckpt-000002-0000000b", "ckpt-000003-0000000c"
A, B = EpisodeId("a"), EpisodeId("b")


class Tally(ResourcesServer):
    """One number a session; `add` takes as long as it is told, `verify` as long as `verify_s`."""

    checkpoint_mode: ClassVar[ResourcesMode] = "exported"
    checkpoint_hook_s: ClassVar[float] = 10.0

    def __init__(self, verify_s: float = 0.0) -> None:
        super().__init__("tally")
        self.totals: dict[str, int] = {}
        self.retired: list[str] = []
        self.cancelled = 0
        self.verify_s = verify_s
        self.export_s: dict[int, float] = {}
        """By total: how long its export takes; negative raises."""

    async def seed_session(self, seed: Seed) -> None:
        await asyncio.sleep(seed.task_data.get("seed_s", 0.0))
        self.totals[seed.session_id] = seed.task_data.get("total", 0)

    @tool
    async def add(self, call: Call, *, number: int, seconds: float = 0.0) -> Json:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            await asyncio.sleep(1.0)  # clean-up takes its time; a second cancel would break it
            self.cancelled += 1
            raise
        self.totals[call.session_id] += number
        return {"total": self.totals[call.session_id]}

    async def verify(self, verification: Verification) -> dict[str, Any]:
        await asyncio.sleep(self.verify_s)
        return {"reward": float(self.totals.get(verification.session_id or "", 0))}

    async def export_session_state(self, session_id: str) -> Json:
        total = self.totals.get(session_id)
        if total is None:
            raise SessionLost(session_id)
        seconds = self.export_s.get(total, 0.0)
        if seconds < 0:
            raise RuntimeError("the state is nowhere")
        await asyncio.sleep(seconds)
        return {"total": total}

    async def validate_session_state(self, session_id: str, state: Json) -> None:
        if not isinstance(state["total"], int):
            raise ValueError("total is no integer")

    async def restore_session_state(self, session_id: str, state: Json) -> None:
        if state["total"] == 13:
            raise RuntimeError("unlucky")
        self.totals[session_id] = state["total"]

    async def retire_session_state(self, session_id: str) -> None:
        self.totals.pop(session_id, None)
        self.retired.append(session_id)


class StatelessTally(Tally):
    checkpoint_mode: ClassVar[ResourcesMode] = "stateless"
    checkpoint_verify: ClassVar[VerifyMode] = "replay"


class RestartTally(Tally):
    checkpoint_mode: ClassVar[ResourcesMode] = "restart_only"


async def seeded(desk: Desk, episode: EpisodeId, **task_data: Any) -> Caller:
    caller = desk.caller(episode.rollout_id, episode.attempt)
    assert (await caller.seed(task_data)).status == 200
    return caller


async def started(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """`work` as a task that has come as far as it gets in a second."""
    task = asyncio.create_task(work)
    await asyncio.sleep(1.0)
    return task


def total(reply: Reply) -> int:
    number: int = value(reply)["total"]
    return number
