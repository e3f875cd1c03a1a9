"""A resources server as a participant: over its routes and its control plane, in virtual time, on real files."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from gymckpt.identity import EpisodeId
from gymckpt.jsoncodec import Json
from gymckpt.ports import Reply
from gymckpt.servers.resources.server import Call, ResourcesServer, Seed, SessionLost, Verification, tool
from gymckpt.wire.control import HEADER_RESTART, HEADER_VERIFY, PREFIX, ResourcesMode, VerifyMode
from tests.servers.resources_desk import OFF, Caller, Desk, code, on, value
from tests.simulation.clock import run_virtual

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
