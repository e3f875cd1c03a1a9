"""An author's hook that swallows its cancellation: what it was asked for fails by name, and nothing waits for it."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gymckpt.jsoncodec import Json
from gymckpt.ports import Reply
from tests.roles.tally import A, B, Tally, X, Y, Z, seeded
from tests.servers.resources_desk import Desk, on, value
from tests.simulation.clock import run_virtual


class Stubborn(Tally):
    """The hook named by `stuck` does not let itself be cancelled: it goes on once `let_go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck = ""
        self.let_go = asyncio.Event()
        self.calls: list[str] = []

    async def pass_by(self, hook: str) -> None:
        self.calls.append(hook)
        while hook == self.stuck and not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                continue

    async def export_session_state(self, session_id: str) -> Json:
        await self.pass_by("export")
        return await super().export_session_state(session_id)

    async def validate_session_state(self, session_id: str, state: Json) -> None:
        await self.pass_by("validate")

    async def restore_session_state(self, session_id: str, state: Json) -> None:
        await self.pass_by("restore")
        await super().restore_session_state(session_id, state)

    async def retire_session_state(self, session_id: str) -> None:
        await self.pass_by("retire")
        await super().retire_session_state(session_id)

    async def suspend_session_states(self, session_ids: Sequence[str]) -> None:
        await self.pass_by("suspend")

    async def wake_session_states(self, session_ids: Sequence[str]) -> None:
        await self.pass_by("wake")


class StubbornBatch(Stubborn):
    """Its hook takes the whole batch."""

    async def export_session_states(self, session_ids: Sequence[str]) -> Mapping[str, Json]:
        await self.pass_by("export")
        return {session_id: {"total": self.totals[session_id]} for session_id in session_ids}


async def committed(desk: Desk, checkpoint_id: str, root: Path, *, seconds: float = 300.0, **fields: Any) -> Reply:
    await desk.done("prepare", checkpoint_id)
    directory = str(root / checkpoint_id)
    return await desk.control(
        "commit", checkpoint_id, seconds=seconds, checkpoint_dir=directory, episode_ids=None, **fields
    )


async def overdue(desk: Desk) -> int:
    count: int = (await desk.status())["report"]["counts"]["overdue_hooks"]
    return count


def manifests(root: Path) -> list[str]:
    """The checkpoints that one was written of."""
    return [path.relative_to(root).parts[0] for path in root.rglob("manifest.json")]


def detail(reply: Reply) -> str:
    assert reply.status == 409, reply
    said: str = value(reply)["error"]["detail"]
    return said


@pytest.mark.parametrize(("kind", "limit_s"), [(Stubborn, 10.0), (StubbornBatch, 15.0)])
def test_an_export_that_swallows_cancellation_fails_each_checkpoint_in_time_and_by_name(
    tmp_path: Path, kind: type[Stubborn], limit_s: float
) -> None:
    async def main() -> None:
        server = kind()
        desk = Desk(server, on(tmp_path))
        caller = await seeded(desk, A, total=1)
        server.stuck = "export"
        for number, checkpoint_id in enumerate((X, Y), start=1):
            begun_s = desk.clock.monotonic()
            said = detail(await committed(desk, checkpoint_id, tmp_path))
            assert desk.clock.monotonic() - begun_s < limit_s + 3.0
            assert "session " in said
            assert "episode a" in said
            assert f"longer than {limit_s:g} s" in said
            await desk.done("resume", checkpoint_id, seconds=1.0)
            assert (await caller.use("add", {"number": 1}))["total"] == 1 + number
            assert await overdue(desk) == number
        server.stuck = ""
        assert (await committed(desk, Z, tmp_path)).status == 200
        await desk.done("resume", Z)
        assert manifests(tmp_path) == [Z]
        server.let_go.set()
        await asyncio.sleep(1.0)
        assert await overdue(desk) == 0

    run_virtual(main())


def test_a_resume_in_the_middle_of_such_an_export_opens_the_server(tmp_path: Path) -> None:
    async def main() -> None:
        server = Stubborn()
        desk = Desk(server, on(tmp_path))
        caller = await seeded(desk, A)
        server.stuck = "export"
        committing = asyncio.create_task(committed(desk, X, tmp_path))
        await asyncio.sleep(1.0)
        await desk.done("resume", X, seconds=5.0)
        assert (await caller.tool("add", {"number": 1})).status == 200
        assert detail(await committing)
        server.let_go.set()
        await asyncio.sleep(1.0)

    run_virtual(main())


@pytest.mark.parametrize("kind", [Stubborn, StubbornBatch])
def test_a_commit_whose_deadline_comes_before_the_hooks_limit_names_the_session_too(
    tmp_path: Path, kind: type[Stubborn]
) -> None:
    async def main() -> None:
        server = kind()
        desk = Desk(server, on(tmp_path))
        await seeded(desk, A)
        await seeded(desk, B)
        server.stuck = "export"
        said = detail(await committed(desk, X, tmp_path, seconds=5.0))
        assert "outlived the deadline" in said
        assert "session " in said
        assert "of episode " in said
        await desk.done("resume", X, seconds=5.0)
        server.let_go.set()
        await asyncio.sleep(1.0)
        assert await overdue(desk) == 0

    run_virtual(main())


def test_a_restore_whose_deadline_comes_before_the_hooks_limit_names_the_session_too(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(Stubborn(), on(tmp_path))
        await seeded(desk, A)
        await desk.checkpoint(X, tmp_path / X)
        server = Stubborn()
        desk.boot(server)
        server.stuck = "restore"
        fields: dict[str, Any] = {"checkpoint_dir": str(tmp_path / X), "episode_ids": [{"rollout_id": "a"}]}
        said = detail(await desk.control("restore", Y, seconds=5.0, **fields))
        assert "by its deadline" in said
        assert "restoring session " in said
        server.let_go.set()
        await desk.done("resume", Y)

    run_virtual(main())


@pytest.mark.parametrize("hook", ["validate", "restore"])
def test_a_restore_that_swallows_cancellation_installs_nothing_and_leaves_the_server_open(
    tmp_path: Path, hook: str
) -> None:
    async def main() -> None:
        desk = Desk(Stubborn(), on(tmp_path))
        await seeded(desk, A, total=7)
        await desk.checkpoint(X, tmp_path / X)
        server = Stubborn()
        desk.boot(server)
        server.stuck = hook
        named = [{"rollout_id": "a", "attempt": 0}]
        fields: dict[str, Any] = {"checkpoint_dir": str(tmp_path / X), "episode_ids": named}
        reply = await desk.control("restore", Y, seconds=300.0, **fields)
        assert "session " in value(reply)["error"]["detail"], reply
        await desk.done("resume", Y, seconds=1.0)
        assert (await seeded(desk, B)).cookies
        if hook == "restore":
            named = [{"rollout_id": "b", "attempt": 0}]
            await desk.done("retire", Z, episode_ids=named)
            server.stuck = ""
            assert "1 still live here" in detail(await desk.control("restore", Z, **fields))
        server.stuck = ""
        server.let_go.set()
        await asyncio.sleep(1.0)
        assert server.totals == {} if hook == "restore" else len(server.totals) == 1
        if hook == "restore":
            await desk.done("restore", Z, **fields)
            assert list(server.totals.values()) == [7]

    run_virtual(main())


def test_a_retire_that_swallows_cancellation_fails_by_name_and_runs_once_at_a_time(tmp_path: Path) -> None:
    async def main() -> None:
        server = Stubborn()
        desk = Desk(server, on(tmp_path))
        await seeded(desk, A)
        await seeded(desk, B)
        server.stuck = "retire"
        named = [{"rollout_id": "a", "attempt": 0}]
        for _ in range(2):
            assert "session " in detail(await desk.control("retire", X, seconds=60.0, episode_ids=named))
        assert server.calls.count("retire") == 1
        assert (await committed(desk, Y, tmp_path)).status == 200
        await desk.done("resume", Y)
        server.let_go.set()
        await asyncio.sleep(1.0)
        await desk.done("retire", X, episode_ids=named)
        assert len(server.totals) == 1

    run_virtual(main())


def test_a_suspend_that_comes_to_its_end_late_is_undone(tmp_path: Path) -> None:
    async def main() -> None:
        server = Stubborn()
        desk = Desk(server, on(tmp_path))
        await seeded(desk, A)
        server.stuck = "suspend"
        assert (await committed(desk, X, tmp_path, stop=True)).status == 200
        await desk.done("resume", X, seconds=40.0)
        assert server.calls == ["export", "suspend", "wake"]
        server.let_go.set()
        await asyncio.sleep(1.0)
        assert server.calls == ["export", "suspend", "wake", "wake"]
        assert await overdue(desk) == 0

    run_virtual(main())


def test_a_hook_that_raises_a_cancellation_of_its_own_fails_by_name(tmp_path: Path) -> None:
    class Confused(Tally):
        async def export_session_state(self, session_id: str) -> Json:
            raise asyncio.CancelledError

    async def main() -> None:
        desk = Desk(Confused(), on(tmp_path))
        await seeded(desk, A)
        assert "cancelled by its own code (episode a)" in detail(await committed(desk, X, tmp_path))

    run_virtual(main())
