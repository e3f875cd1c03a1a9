"""A resources server as a participant: over its routes and its control plane, in virtual time, on real files."""

import asyncio
from pathlib import Path

import pytest

from gymckpt.wire.control import HEADER_RESTART, HEADER_VERIFY, PREFIX
from tests.roles.tally import A, B, RestartTally, StatelessTally, Tally, X, Y, Z, seeded, started, total
from tests.servers.resources_desk import OFF, Desk, code, on
from tests.simulation.clock import run_virtual


def test_a_request_that_comes_while_closed_waits_for_the_resume_and_blocks_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(Tally(), on(tmp_path))
        caller = await seeded(desk, A, total=1)
        await desk.done("prepare", X)
        waiting = await started(caller.tool("add", {"number": 2}))
        verifying = await started(caller.verify())
        seeding = await started(desk.caller("b").seed())
        report = (await desk.done("prepare", X))["report"]
        assert (report["ready"], report["blockers"]) == (True, [])
        await desk.done("commit", X, checkpoint_dir=str(tmp_path / X), episode_ids=None)
        assert not waiting.done() | verifying.done() | seeding.done()
        assert (await desk.status())["report"]["counts"]["waiting"] == 3
        await desk.done("resume", X)
        assert total(await waiting) == 3
        assert {(await verifying).status, (await seeding).status} == {200}

    run_virtual(main())


def test_a_call_in_flight_blocks_by_its_capture_key_until_it_has_ended(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(Tally(), on(tmp_path))
        caller = await seeded(desk, A)
        running = await started(caller.tool("add", {"number": 2, "seconds": 20.0}))
        missed = await desk.done("prepare", X, seconds=5.0)
        assert (missed["phase"], missed["report"]["blockers"]) == ("preparing", ["a"])
        assert (await desk.done("prepare", X, seconds=60.0))["phase"] == "prepared"
        assert running.done()

    run_virtual(main())


def test_a_seed_in_flight_blocks_and_is_then_exported(tmp_path: Path) -> None:
    async def main() -> list[str]:
        desk = Desk(Tally(), on(tmp_path))
        await started(desk.caller("a").seed({"seed_s": 5.0}))
        await desk.done("prepare", X)
        committed = await desk.done("commit", X, checkpoint_dir=str(tmp_path / X), episode_ids=None)
        keys: list[str] = committed["episode_ids"]
        return keys

    assert run_virtual(main()) == ["a"]


def test_a_repeatable_verify_of_a_stateless_server_passes_a_checkpoint_uncounted(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(StatelessTally(verify_s=50.0), on(tmp_path))
        caller = await seeded(desk, A)
        before = await started(caller.verify())
        assert (await desk.done("prepare", X))["phase"] == "prepared"
        during = await started(caller.verify())
        await desk.done("commit", X, checkpoint_dir=str(tmp_path / X), episode_ids=None)
        assert not before.done()
        assert (await before).status == (await during).status == 200
        assert (await desk.status())["phase"] == "committed"

    run_virtual(main())


def test_a_verify_of_an_exported_server_blocks_while_it_runs(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(Tally(verify_s=100.0), on(tmp_path))
        caller = await seeded(desk, A)
        await started(caller.verify())
        assert (await desk.done("prepare", X, seconds=5.0))["report"]["blockers"] == ["a"]

    run_virtual(main())


def test_the_late_clean_up_of_a_dead_attempt_does_not_end_the_session_of_its_successor(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(Tally(), on(tmp_path))
        caller = await seeded(desk, A, total=5)
        await desk.checkpoint(X, tmp_path / X)
        await desk.retire(Y, A)
        await desk.restore(Z, tmp_path / X, A)
        assert (await caller.close()).status == 200
        assert total(await caller.next_attempt().tool("add", {"number": 1})) == 6

    run_virtual(main())


def test_an_end_that_comes_while_closed_is_recorded_and_carried_out_after_the_resume(tmp_path: Path) -> None:
    async def main() -> None:
        server = Tally()
        desk = Desk(server, on(tmp_path))
        caller = await seeded(desk, A, total=5)
        await desk.done("prepare", X)
        assert (await caller.close()).status == 200
        committed = await desk.done("commit", X, checkpoint_dir=str(tmp_path / X), episode_ids=None)
        assert committed["episode_ids"] == ["a"]
        assert server.retired == []
        await desk.done("resume", X)
        await asyncio.sleep(1.0)
        assert len(server.retired) == 1
        assert code(await caller.tool("add", {"number": 1})) == "409 unknown_session"
        assert (await caller.close()).status == 200  # never refused

    run_virtual(main())


def test_a_verified_session_stays_until_it_is_closed_or_a_minute_has_passed_but_never_during_a_checkpoint(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        server = Tally()
        desk = Desk(server, on(tmp_path))
        closed, unclosed = await seeded(desk, A), await seeded(desk, B)
        assert (await closed.verify()).status == (await unclosed.verify()).status == 200
        await closed.close()
        assert len(server.retired) == 1
        await asyncio.sleep(50.0)
        await desk.done("prepare", X)
        await asyncio.sleep(20.0)
        committed = await desk.done("commit", X, checkpoint_dir=str(tmp_path / X), episode_ids=None)
        assert committed["episode_ids"] == ["b"]
        await desk.done("resume", X)
        await asyncio.sleep(1.0)
        assert len(server.retired) == 2

    run_virtual(main())


def test_a_retire_stops_a_running_call_once_and_answers_when_nothing_is_left(tmp_path: Path) -> None:
    async def main() -> None:
        server = Tally()
        desk = Desk(server, on(tmp_path))
        caller = await seeded(desk, A, total=5)
        running = await started(caller.tool("add", {"number": 2, "seconds": 1000.0}))
        first = await started(desk.retire(X, A))
        second = await desk.retire(Y, A)
        assert (await first)["retired"] == second["retired"] == ["a"]
        assert (server.cancelled, server.totals) == (1, {})
        assert code(await running) == "409 stale_attempt"
        assert code(await caller.tool("add", {"number": 1})) == "409 stale_attempt"
        assert code(await desk.caller("a").seed()) == "409 stale_attempt"
        assert (await desk.status())["retired_sessions"] == 1

    run_virtual(main())


def test_a_retire_stops_a_seed_in_progress_and_frees_what_it_built(tmp_path: Path) -> None:
    async def main() -> None:
        server = Tally()
        desk = Desk(server, on(tmp_path))
        seeding = await started(desk.caller("a").seed({"seed_s": 1000.0}))
        await desk.retire(X, A)
        assert code(await seeding) == "409 stale_attempt"
        assert len(server.retired) >= 1
        assert (await desk.status())["report"]["counts"]["sessions"] == 0

    run_virtual(main())


def test_a_retire_leaves_the_next_attempt_alone(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(Tally(), on(tmp_path))
        successor = await seeded(desk, A.next, total=1)
        await desk.retire(X, A)
        assert total(await successor.tool("add", {"number": 1})) == 2

    run_virtual(main())


def test_the_same_seed_again_is_the_same_session_also_while_the_first_still_runs(tmp_path: Path) -> None:
    async def main() -> None:
        server = Tally()
        desk = Desk(server, on(tmp_path))
        caller = desk.caller("a")
        first = await started(caller.seed({"seed_s": 5.0, "total": 1}))
        retry = desk.caller("a")
        assert (await retry.seed({"seed_s": 5.0, "total": 1})).status == (await first).status == 200
        assert total(await caller.tool("add", {"number": 1})) == 2
        assert total(await retry.tool("add", {"number": 1})) == 3
        assert (len(server.totals), server.retired) == (1, [])

    run_virtual(main())


def test_a_new_execution_replaces_the_session_of_the_old_one(tmp_path: Path) -> None:
    async def main() -> None:
        server = Tally()
        desk = Desk(server, on(tmp_path))
        old = await seeded(desk, A, total=1)
        new = desk.caller("a", caller_id="resources-of-another-execution")
        await new.seed({"total": 10})
        assert code(await old.tool("add", {"number": 1})) == "409 stale_attempt"
        assert total(await new.tool("add", {"number": 1})) == 11
        await seeded(desk, A.next)
        assert code(await new.tool("add", {"number": 1})) == "409 stale_attempt"
        assert code(await desk.caller("a", caller_id="late").seed()) == "409 stale_attempt"
        assert len(server.totals) == 1

    run_virtual(main())


def test_a_seed_that_ends_late_does_not_take_the_place_of_a_later_attempt(tmp_path: Path) -> None:
    async def main() -> None:
        server = Tally()
        desk = Desk(server, on(tmp_path))
        late = await started(desk.caller("a").seed({"seed_s": 5.0}))
        newer = await seeded(desk, A.next, total=1)
        assert code(await late) == "409 stale_attempt"
        assert total(await newer.tool("add", {"number": 1})) == 2
        assert len(server.totals) == 1

    run_virtual(main())


def test_a_failed_seed_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        server = Tally()
        desk = Desk(server, on(tmp_path))
        assert (await desk.caller("a").seed({"seed_s": "no number"})).status == 500
        assert (await desk.status())["report"]["counts"]["sessions"] == 0
        await seeded(desk, A)

    run_virtual(main())


@pytest.mark.parametrize(
    ("server", "verify", "restart"),
    [(Tally(), "wait", None), (StatelessTally(), "replay", None), (RestartTally(), "wait", "1")],
)
def test_the_seed_reply_says_what_can_be_captured(
    tmp_path: Path, server: Tally, verify: str, restart: str | None
) -> None:
    async def main() -> None:
        caller = await seeded(Desk(server, on(tmp_path)), A)
        assert (caller.headers.get(HEADER_VERIFY), caller.headers.get(HEADER_RESTART)) == (verify, restart)

    run_virtual(main())


def test_a_session_seeded_without_an_identity_is_said_to_be_a_restart_and_is_never_exported(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(Tally(), on(tmp_path))
        reply = await desk.post("/seed_session", {"total": 3})
        assert reply.headers[HEADER_RESTART] == "1"
        assert total(await desk.post("/add", {"number": 1}, dict(reply.cookies))) == 4
        assert (await desk.checkpoint(X, tmp_path / X))["episode_ids"] == []

    run_virtual(main())


def test_a_restart_only_server_never_closes_never_blocks_and_names_its_sessions(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(RestartTally(), on(tmp_path))
        caller = await seeded(desk, A, total=1)
        running = await started(caller.tool("add", {"number": 1, "seconds": 500.0}))
        prepared = await desk.done("prepare", X)
        assert (prepared["phase"], prepared["report"]["restarts"]) == ("prepared", ["a"])
        assert total(await caller.tool("add", {"number": 1})) == 2  # answered at once
        await seeded(desk, B)
        assert (await desk.status())["report"]["restarts"] == ["a"]  # frozen by the prepare
        scope = [{"rollout_id": "a", "attempt": 0}]
        refused = await desk.control("commit", X, checkpoint_dir=str(tmp_path / X), episode_ids=scope)
        assert code(refused) == "409 restart_in_scope"
        committed = await desk.done("commit", X, checkpoint_dir=str(tmp_path / X), episode_ids=[])
        assert committed["episode_ids"] == []
        await desk.done("resume", X)
        assert (await desk.status())["report"]["restarts"] == ["a", "b"]
        assert not running.done()

    run_virtual(main())


def test_with_checkpoints_off_there_is_no_header_no_control_route_and_no_waiting() -> None:
    async def main() -> None:
        desk = Desk(Tally(), OFF)
        caller = await seeded(desk, A, total=1)
        assert not [name for name in caller.headers if name.startswith("x-ng")]
        assert (await desk.control("prepare", X)).status == 404
        assert (await desk.post(f"{PREFIX}/status", {})).status == 404
        assert total(await caller.tool("add", {"number": 1})) == 2
        assert (await caller.tool("add", {"number": 1}, prefixed=True)).status == 404

    run_virtual(main())


def test_arguments_that_a_tool_does_not_take_are_refused_before_it_runs(tmp_path: Path) -> None:
    async def main() -> None:
        caller = await seeded(Desk(Tally(), on(tmp_path)), A)
        assert (await caller.tool("add", {"numbers": 1})).status == 422
        assert (await caller.tool("verify_nothing", {})).status == 404

    run_virtual(main())
