"""States of sessions on their way into a checkpoint and back, and hooks that fail, hang or lie."""

from pathlib import Path

import pytest

from gymckpt.identity import EpisodeId
from tests.roles.tally import A, B, StatelessTally, Tally, X, Y, Z, seeded, total
from tests.servers.resources_desk import Desk, code, on, value
from tests.simulation.clock import run_virtual


def test_a_stateless_server_lists_its_sessions_without_a_state_and_restores_them(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(StatelessTally(), on(tmp_path))
        caller = await seeded(desk, A)
        assert (await desk.checkpoint(X, tmp_path / X))["episode_ids"] == ["a"]
        desk.boot(StatelessTally())
        assert code(await caller.verify()) == "409 unknown_session"
        assert (await desk.restore(Y, tmp_path / X, A))["restored"] == ["a-a1"]
        assert (await caller.next_attempt().verify()).status == 200

    run_virtual(main())


def test_a_restored_session_answers_to_the_same_cookie_as_the_next_attempt(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(Tally(), on(tmp_path))
        caller = await seeded(desk, A, total=5)
        await desk.checkpoint(X, tmp_path / X)
        await caller.tool("add", {"number": 100})
        desk.boot(Tally())
        await desk.restore(Y, tmp_path / X, A)
        successor = caller.next_attempt()
        assert code(await caller.tool("add", {"number": 1}, prefixed=True)) == "409 stale_attempt"
        assert total(await successor.tool("add", {"number": 1}, prefixed=True)) == 6
        assert total(await successor.tool("add", {"number": 1})) == 7

    run_virtual(main())


@pytest.mark.parametrize(
    ("seconds", "said"), [(-1.0, "RuntimeError: the state is nowhere"), (11.0, "a hook took longer than 10 s")]
)
def test_an_export_that_fails_or_hangs_fails_that_checkpoint_by_the_sessions_name_and_the_next_one_works(
    tmp_path: Path, seconds: float, said: str
) -> None:
    async def main() -> None:
        server = Tally()
        desk = Desk(server, on(tmp_path))
        await seeded(desk, A, total=1)
        await seeded(desk, B, total=2)
        session_id = next(session_id for session_id, number in server.totals.items() if number == 2)
        server.export_s[2] = seconds
        await desk.done("prepare", X)
        failed = await desk.control("commit", X, checkpoint_dir=str(tmp_path / X), episode_ids=None)
        assert code(failed) == "409 checkpoint_error"
        assert f"session {session_id}: {said} (episode b)" in value(failed)["error"]["detail"]
        await desk.done("resume", X)
        assert not list((tmp_path / X).rglob("manifest.json"))
        server.export_s.clear()
        assert (await desk.checkpoint(Y, tmp_path / Y))["episode_ids"] == ["a", "b"]

    run_virtual(main())


def test_a_lost_session_is_left_out_of_the_checkpoint(tmp_path: Path) -> None:
    async def main() -> list[str]:
        server = Tally()
        desk = Desk(server, on(tmp_path))
        await seeded(desk, A, total=1)
        server.totals.clear()
        await seeded(desk, B, total=2)
        keys: list[str] = (await desk.checkpoint(X, tmp_path / X))["episode_ids"]
        return keys

    assert run_virtual(main()) == ["b"]


def test_many_slow_hooks_run_side_by_side(tmp_path: Path) -> None:
    async def main() -> float:
        server = Tally()
        desk = Desk(server, on(tmp_path))
        for number in range(500):
            await seeded(desk, EpisodeId(f"r{number}"), total=number)
        server.export_s = dict.fromkeys(range(500), 2.0)
        begin = desk.clock.monotonic()
        committed = await desk.checkpoint(X, tmp_path / X)
        assert len(committed["episode_ids"]) == 500
        return desk.clock.monotonic() - begin

    # One batch to learn how large they are, one for all others.
    assert run_virtual(main()) <= 5.0


def test_a_restore_that_fails_halfway_installs_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(Tally(), on(tmp_path))
        await seeded(desk, A, total=1)
        await seeded(desk, B, total=13)
        await desk.checkpoint(X, tmp_path / X)
        server = Tally()
        desk.boot(server)
        named = [{"rollout_id": "a", "attempt": 0}, {"rollout_id": "b", "attempt": 0}]
        failed = await desk.control("restore", Y, checkpoint_dir=str(tmp_path / X), episode_ids=named)
        assert failed.status >= 400
        assert "unlucky" in value(failed)["error"]["detail"]
        assert server.totals == {}
        status = await desk.status()
        assert (status["phase"], status["report"]["counts"]["sessions"]) == ("idle", 0)
        assert (await desk.restore(Z, tmp_path / X, A))["restored"] == ["a-a1"]

    run_virtual(main())


def test_a_state_that_the_server_refuses_fails_the_restore_before_anything_is_installed(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(Tally(), on(tmp_path))
        await seeded(desk, A, total=1)
        server = Tally()
        await seeded(desk, B, total="none")
        await desk.checkpoint(X, tmp_path / X)
        desk.boot(server)
        named = [{"rollout_id": "a", "attempt": 0}, {"rollout_id": "b", "attempt": 0}]
        failed = await desk.control("restore", Y, checkpoint_dir=str(tmp_path / X), episode_ids=named)
        assert code(failed) == "422 invalid_checkpoint_state"
        assert "total is no integer" in value(failed)["error"]["detail"]
        assert (server.totals, server.retired) == ({}, [])

    run_virtual(main())


def test_a_restored_session_that_nobody_claimed_is_dropped_by_the_next_checkpoint_without_it(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(Tally(), on(tmp_path))
        claimed = await seeded(desk, A, total=1)
        await seeded(desk, B, total=2)
        await desk.checkpoint(X, tmp_path / X)
        server = Tally()
        desk.boot(server)
        await desk.restore(Y, tmp_path / X, A, B)
        assert total(await claimed.next_attempt().tool("add", {"number": 1})) == 2
        await desk.done("prepare", Z)
        scope = [{"rollout_id": "a", "attempt": 1}]
        await desk.done("commit", Z, checkpoint_dir=str(tmp_path / Z), episode_ids=scope)
        await desk.done("resume", Z)
        assert list(server.totals.values()) == [2]

    run_virtual(main())
