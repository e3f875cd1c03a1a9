"""Two thousand live sessions whose export hooks are slow: in time, and without holding all states at once."""

import asyncio
import weakref
from pathlib import Path
from typing import Any, ClassVar

from gymckpt.identity import EpisodeId
from gymckpt.jsoncodec import Json
from gymckpt.roles.resources_hooks import HookLimits
from gymckpt.servers.resources.server import ResourcesServer, Seed
from gymckpt.wire.control import ResourcesMode
from tests.servers.resources_desk import Desk, on
from tests.simulation.clock import run_virtual

SESSIONS = 2000
HOOK_S = 1.0
STATE_BYTES = 20_000
X = "ckpt-000001-0000000a"


class State(dict[str, Any]):
    """A state that can be watched."""


class Slow(ResourcesServer):
    """Every export takes a second; counts the states that anybody still holds."""

    checkpoint_mode: ClassVar[ResourcesMode] = "exported"

    def __init__(self) -> None:
        super().__init__("slow")
        self.running = self.most_running = 0
        self.held = self.most_held = 0

    async def seed_session(self, seed: Seed) -> None:
        """Nothing to make."""

    async def export_session_state(self, session_id: str) -> Json:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(HOOK_S)
        self.running -= 1
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        state = State(text=session_id.ljust(STATE_BYTES, "."))
        weakref.finalize(state, self._freed)
        return state

    async def restore_session_state(self, session_id: str, state: Json) -> None:
        """Nothing is restored here."""

    def _freed(self) -> None:
        self.held -= 1


def test_two_thousand_slow_exports_run_side_by_side_and_only_a_batch_or_two_is_held(tmp_path: Path) -> None:
    async def main() -> None:
        server = Slow()
        desk = Desk(server, on(tmp_path))
        callers = [desk.caller(f"r{number}") for number in range(SESSIONS)]
        await asyncio.gather(*(caller.seed() for caller in callers))
        await desk.done("prepare", X)
        begun_s = desk.clock.monotonic()
        committed = await desk.done("commit", X, checkpoint_dir=str(tmp_path / X), episode_ids=None)
        took_s = desk.clock.monotonic() - begun_s
        assert set(committed["episode_ids"]) == {EpisodeId(f"r{number}").capture_key for number in range(SESSIONS)}
        # One after the other they would take 2,000 s; the default deadline of a checkpoint is far below that.
        assert took_s <= 10 * HOOK_S
        batch = HookLimits().batch_bytes // STATE_BYTES
        assert server.most_running <= 1.1 * batch
        assert server.most_held <= 2.2 * batch

    run_virtual(main())
