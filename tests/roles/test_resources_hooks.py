"""Session states on their way out and in: bounded batches, failures by name, frees that are tried again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gymckpt.errors import CheckpointFailed
from gymckpt.identity import EpisodeId
from gymckpt.jsoncodec import Json
from gymckpt.roles.resources_hooks import HookLimits, export_states, restore_states, state_batches
from gymckpt.roles.resources_sessions import Session
from gymckpt.servers.resources.server import ResourcesServer
from tests.roles.tally import A, Tally, X, Y, seeded
from tests.servers.resources_desk import Desk, on
from tests.simulation.clock import run_virtual


class Batches(ResourcesServer):
    """Notes how large the batches are that it is asked for."""

    def __init__(self, state_bytes: int) -> None:
        super().__init__("batches")
        self.state_bytes = state_bytes
        self.sizes: list[int] = []
        self.restored: list[int] = []
        self.retired: list[str] = []

    async def export_session_states(self, session_ids: Sequence[str]) -> Mapping[str, Json]:
        self.sizes.append(len(session_ids))
        return dict.fromkeys(session_ids, "x" * self.state_bytes)

    async def restore_session_states(self, states: Mapping[str, Json]) -> None:
        self.restored.append(len(states))
        if len(self.restored) == 3:
            raise RuntimeError("no more room")

    async def retire_session_state(self, session_id: str) -> None:
        self.retired.append(session_id)


def sessions(count: int) -> list[Session]:
    return [Session(f"s{number}", EpisodeId(f"r{number}")) for number in range(count)]


async def exported(hooks: Any, count: int, limits: HookLimits) -> list[str]:
    return [session.session_id async for session, _ in export_states(hooks, sessions(count), limits)]


def test_a_batch_of_states_stays_within_its_bytes_once_sizes_are_known() -> None:
    async def main() -> None:
        server = Batches(state_bytes=1000)
        limits = HookLimits(batch_bytes=10_000, first_batch=4)
        assert await exported(server, 100, limits) == [f"s{number}" for number in range(100)]
        assert server.sizes[0] == 4
        assert max(server.sizes[1:]) == 9

    run_virtual(main())


def test_a_state_larger_than_a_batch_has_one_of_its_own() -> None:
    states: dict[str, Json] = {"a": "x" * 50, "b": "x" * 5000, "c": ["x" * 50], "d": {"n": 1}}
    assert [list(batch) for batch in state_batches(states, 1000)] == [["a"], ["b"], ["c", "d"]]


def test_a_hook_that_answers_for_another_session_fails_the_checkpoint() -> None:
    class Confused(Batches):
        async def export_session_states(self, session_ids: Sequence[str]) -> Mapping[str, Json]:
            return {"other": 1}

    with pytest.raises(CheckpointFailed, match="session s0 of episode r0: the hook answered for 'other'"):
        run_virtual(exported(Confused(1), 1, HookLimits()))


def test_a_batch_that_fails_names_some_of_its_sessions_and_counts_the_others() -> None:
    class Broken(Batches):
        async def export_session_states(self, session_ids: Sequence[str]) -> Mapping[str, Json]:
            raise OSError("gone")

    with pytest.raises(CheckpointFailed, match=r"session s0 of episode r0, .* and 15 more: OSError: gone"):
        run_virtual(exported(Broken(1), 20, HookLimits()))


def test_a_restore_that_fails_in_a_late_batch_retires_all_of_them() -> None:
    async def main() -> None:
        server = Batches(state_bytes=1)
        states: dict[str, Json] = {f"s{number}": "x" * 600 for number in range(6)}
        with pytest.raises(CheckpointFailed, match="restoring the state of session s2: RuntimeError: no more room"):
            await restore_states(server, states, {}, HookLimits(batch_bytes=1000))
        assert server.retired == list(states)

    run_virtual(main())


def test_a_free_that_failed_is_tried_again_and_until_then_the_server_is_not_empty(tmp_path: Path) -> None:
    class Stuck(Tally):
        failures = 1

        async def retire_session_state(self, session_id: str) -> None:
            if self.failures:
                self.failures -= 1
                raise OSError("busy")
            await super().retire_session_state(session_id)

    async def main() -> None:
        server = Stuck()
        desk = Desk(server, on(tmp_path))
        await seeded(desk, A)
        named = [{"rollout_id": "a", "attempt": 0}]
        assert (await desk.control("retire", X, episode_ids=named)).status >= 400
        assert (await desk.retire(Y, A))["retired"] == ["a"]
        assert len(server.retired) == 1

    run_virtual(main())


def test_compute_is_suspended_only_where_it_can_be_woken() -> None:
    class OnlySuspends(Tally):
        async def suspend_session_states(self, session_ids: Sequence[str]) -> None: ...

    class Both(OnlySuspends):
        async def wake_session_states(self, session_ids: Sequence[str]) -> None: ...

    assert (Tally().can_suspend(), OnlySuspends().can_suspend(), Both().can_suspend()) == (False, False, True)
