"""Phases, fence, lease and results of one participant."""

import asyncio
from pathlib import Path

import pytest

from gymckpt import crashpoints
from gymckpt.crashpoints import CrashPointError
from gymckpt.identity import EpisodeId, new_checkpoint_id
from gymckpt.participant.phases import FENCED_IDS
from gymckpt.wire.control import MAX_DEADLINE_S
from tests.participant.roles import BrokenInstallRole, CounterRole, busy
from tests.participant.stand import GRACE_S, A, B, Stand, X, Y, Z, refused, soon, started, virtually


def test_a_checkpoint_goes_from_idle_over_preparing_prepared_and_committed_back_to_idle(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        assert stand.participant.phase == "idle"
        async with busy(stand.role, A, 5.0):
            preparing = asyncio.create_task(stand.prepare(X))
            await soon()
            assert (await stand.participant.status()).phase == "preparing"
            assert (await preparing).phase == "prepared"
        assert not stand.role.gate.is_open
        assert (await stand.commit(X)).phase == "committed"
        assert (await stand.participant.status()).checkpoint_id == X
        assert (await stand.resume(X)).phase == "idle"
        assert stand.is_open()

    virtually(rule)


def test_a_restore_goes_from_idle_to_restored_and_back(tmp_path: Path) -> None:
    async def rule() -> None:
        first = Stand(tmp_path)
        await started(first, A)
        await first.checkpoint(X)
        stand = Stand(tmp_path)
        assert (await stand.restore(Y, X, [A])).phase == "restored"
        assert stand.participant.phase == "restored"
        assert not stand.role.gate.is_open
        await stand.resume(Y)
        assert stand.is_open()

    virtually(rule)


def test_a_prepare_waits_for_blockers_and_no_longer_than_its_deadline(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        async with busy(stand.role, A, 100.0):
            reply = await stand.prepare(X, seconds=30)
            assert stand.clock.monotonic() == pytest.approx(30)
            assert (reply.phase, reply.report.ready, reply.report.blockers) == ("preparing", False, ["a"])
            assert not stand.role.gate.is_open
            assert stand.participant.counters["prepare_not_ready"] == 1
            again = await stand.prepare(X, seconds=80)
            assert again.phase == "prepared"
            assert stand.clock.monotonic() == pytest.approx(100)

    virtually(rule)


def test_a_look_at_the_status_does_not_take_the_news_from_a_waiting_prepare(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        async with busy(stand.role, A, 5.0):
            both = [asyncio.create_task(stand.prepare(X)), asyncio.create_task(stand.prepare(X))]
            while not all(task.done() for task in both):
                await stand.participant.status()
                await asyncio.sleep(0.5 if stand.clock.monotonic() < 5 else 0)
                assert stand.clock.monotonic() < 6
            assert both[0].result() == both[1].result()

    virtually(rule)


def test_whatever_is_raised_inside_prepare_opens_admission_again(tmp_path: Path) -> None:
    class BrokenReport(CounterRole):
        def report(self):  # type: ignore[no-untyped-def]
            raise RuntimeError("bug")

    class BrokenClose(CounterRole):
        def close(self) -> None:
            super().close()
            raise RuntimeError("bug")

    async def rule() -> None:
        for role in (BrokenReport(), BrokenClose()):
            stand = Stand(tmp_path, role)
            with pytest.raises(RuntimeError, match="bug"):
                await stand.prepare(X)
            assert stand.is_open()
            assert stand.participant._state.lease.expires_at_s is None

    virtually(rule)


@pytest.mark.parametrize("point", ["prepare.after_close", "prepare.ready"])
def test_an_error_at_any_point_of_prepare_opens_admission_and_the_same_id_may_try_again(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        crashpoints.arm(f"{point}:error")
        try:
            with pytest.raises(CrashPointError):
                await stand.prepare(X)
        finally:
            crashpoints.arm(None)
        assert stand.is_open()
        assert (await stand.prepare(X)).phase == "prepared"

    virtually(rule)


def test_a_commit_is_only_possible_from_prepared(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        await refused("invalid_phase", stand.commit(X))
        async with busy(stand.role, A, 100.0):
            await stand.prepare(X, seconds=1)
            await refused("invalid_phase", stand.commit(X))
            await stand.resume(X)
        await started(first := Stand(tmp_path), B)
        await first.checkpoint(Y)
        restored = Stand(tmp_path)
        await restored.restore(Z, Y, [B])
        await refused("invalid_phase", restored.commit(Z))
        await refused("invalid_phase", restored.prepare(Z))

    virtually(rule)


def test_resume_interrupts_a_prepare_that_waits(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        async with busy(stand.role, A, 1000.0):
            waiting = asyncio.create_task(stand.prepare(X, seconds=900))
            await asyncio.sleep(1)
            assert (await stand.resume(X)).idempotent is False
            await refused("stale_checkpoint", waiting)
            assert stand.clock.monotonic() == pytest.approx(1)
            assert stand.is_open()

    virtually(rule)


def test_a_resumed_id_is_stale_for_every_operation(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await stand.checkpoint(X)
        for operation in (
            stand.prepare(X),
            stand.renew(X),
            stand.commit(X),
            stand.restore(X, X, []),
            stand.retire(X, A),
            stand.forget(X, "a"),
        ):
            await refused("stale_checkpoint", operation)
        assert stand.is_open()
        assert stand.participant.counters["refused.stale_checkpoint"] == 6
        assert (await stand.resume(X)).idempotent is True

    virtually(rule)


def test_a_late_prepare_of_an_aborted_checkpoint_cannot_close_admission(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        reply = await stand.resume(X)
        assert (reply.phase, reply.idempotent) == ("idle", False)
        await refused("stale_checkpoint", stand.prepare(X))
        assert stand.is_open()

    virtually(rule)


def test_a_resume_of_an_id_that_is_not_the_active_one_is_a_conflict_but_fences_it(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await stand.prepare(X)
        await refused("checkpoint_conflict", stand.resume(Y))
        assert stand.participant.phase == "prepared"
        await stand.resume(X)
        await refused("stale_checkpoint", stand.prepare(Y))
        assert stand.is_open()

    virtually(rule)


def test_a_repeated_resume_of_an_old_id_does_not_touch_the_checkpoint_that_is_active_now(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await stand.checkpoint(X)
        await stand.prepare(Y)
        assert (await stand.resume(X)).idempotent is True
        assert stand.participant.phase == "prepared"
        assert not stand.role.gate.is_open

    virtually(rule)


def test_the_last_64_resumed_ids_are_remembered(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        ids = [new_checkpoint_id(number) for number in range(FENCED_IDS + 1)]
        for checkpoint_id in ids:
            await stand.resume(checkpoint_id)
        for checkpoint_id in ids[1:]:
            await refused("stale_checkpoint", stand.renew(checkpoint_id))
        assert (await stand.prepare(ids[0])).phase == "prepared"

    virtually(rule)


def test_another_id_is_a_conflict_while_one_is_active(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await stand.prepare(X)
        for operation in (
            stand.prepare(Y),
            stand.renew(Y),
            stand.commit(Y),
            stand.restore(Y, X, []),
            stand.retire(Y, A),
            stand.forget(Y, "a"),
        ):
            error = await refused("checkpoint_conflict", operation)
            assert X in error.detail
        assert stand.participant.phase == "prepared"

    virtually(rule)


def test_completed_results_are_given_again_word_for_word_until_resume(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A, B)
        prepared = await stand.prepare(X)
        committed = await stand.commit(X, [A])
        stand.role.end(B)
        stand.role.end(A)
        assert (await stand.prepare(X)).model_dump_json() == prepared.model_dump_json()
        assert (await stand.commit(X, [A])).model_dump_json() == committed.model_dump_json()
        assert stand.participant.phase == "committed"
        assert stand.role.exports == 1
        other = Stand(tmp_path)
        restored = await other.restore(Y, X, [A])
        other.role.restored.clear()
        assert (await other.restore(Y, X, [A])).model_dump_json() == restored.model_dump_json()
        assert other.role.restored == {}

    virtually(rule)


def test_the_same_operation_with_other_arguments_is_a_conflict(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A, B)
        await stand.prepare(X)
        await stand.commit(X, [A])
        await refused("checkpoint_conflict", stand.commit(X, [A, B]))
        await refused("checkpoint_conflict", stand.commit(X, None))
        await refused("checkpoint_conflict", stand.commit(X, [A], stop=True))
        await refused("checkpoint_conflict", stand.commit(X, [A], directory=stand.directory(Y)))
        other = Stand(tmp_path)
        await other.restore(Y, X, [A])
        await refused("checkpoint_conflict", other.restore(Y, X, [B]))
        await refused("checkpoint_conflict", other.restore(Y, Z, [A]))

    virtually(rule)


def test_the_order_of_the_scope_is_no_argument(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A, B)
        await stand.prepare(X)
        assert await stand.commit(X, [A, B]) == await stand.commit(X, [B, A])

    virtually(rule)


def test_an_operation_whose_deadline_is_past_on_arrival_does_nothing(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        for operation in (
            stand.prepare(X, seconds=-1),
            stand.restore(X, X, [], seconds=0),
            stand.retire(X, A, seconds=-1e300),
            stand.forget(X, "a", seconds=-1),
            stand.resume(X, seconds=-1),
        ):
            await refused("deadline_exceeded", operation)
        assert stand.is_open()
        assert not stand.role.marks.refuses(A)
        await stand.prepare(X)
        await refused("deadline_exceeded", stand.commit(X, seconds=-1))
        await refused("deadline_exceeded", stand.renew(X, seconds=-1))
        assert stand.participant.phase == "prepared"

    virtually(rule)


def test_a_deadline_is_at_most_an_hour_away(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        async with busy(stand.role, A, 10_000.0):
            reply = await stand.prepare(X, seconds=1e300)
            assert reply.phase == "preparing"
            assert stand.clock.monotonic() == pytest.approx(MAX_DEADLINE_S)

    virtually(rule)


def test_a_jump_of_the_wall_clock_moves_no_deadline_and_no_lease(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        async with busy(stand.role, A, 1000.0):
            waiting = asyncio.create_task(stand.prepare(X, seconds=30))
            await asyncio.sleep(1)
            stand.clock.skew_s += 86_400
            assert (await waiting).phase == "preparing"
            assert stand.clock.monotonic() == pytest.approx(30)
            await asyncio.sleep(GRACE_S - 1)
            assert stand.participant.phase == "preparing"
            await asyncio.sleep(2)
            assert stand.is_open()

    virtually(rule)


def test_at_the_end_of_its_lease_a_participant_resumes_itself_and_the_id_is_stale(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        await stand.prepare(X, seconds=30)
        assert (await stand.participant.status()).lease_expires_at == pytest.approx(stand.clock.time() + 30 + GRACE_S)
        await asyncio.sleep(30 + GRACE_S - 0.1)
        assert stand.participant.phase == "prepared"
        await asyncio.sleep(0.2)
        assert stand.is_open()
        assert stand.participant.counters["lease_expired"] == 1
        assert (await stand.participant.status()).lease_expires_at is None
        await refused("stale_checkpoint", stand.commit(X))
        await stand.role.bump(A)

    virtually(rule)


def test_the_lease_is_only_ever_extended(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await stand.prepare(X, seconds=100)
        first = stand.clock.time() + 100 + GRACE_S
        assert (await stand.renew(X, seconds=10)).lease_expires_at == pytest.approx(first)
        later = (await stand.renew(X, seconds=500)).lease_expires_at
        assert later == pytest.approx(stand.clock.time() + 500 + GRACE_S)
        await stand.commit(X, seconds=1000)
        await asyncio.sleep(1000 + GRACE_S - 1)
        assert stand.participant.phase == "committed"
        await asyncio.sleep(2)
        assert stand.is_open()

    virtually(rule)


def test_retire_and_forget_renew_the_lease_of_a_restored_participant(tmp_path: Path) -> None:
    async def rule() -> None:
        first = Stand(tmp_path)
        await started(first, A, B)
        await first.checkpoint(X)
        stand = Stand(tmp_path)
        await stand.restore(Y, X, [A, B], seconds=10)
        await asyncio.sleep(GRACE_S)
        await stand.retire(Y, A.next, seconds=30)
        await asyncio.sleep(GRACE_S)
        await stand.forget(Y, "a", seconds=30)
        await asyncio.sleep(GRACE_S)
        assert stand.participant.phase == "restored"
        await asyncio.sleep(31)
        assert stand.is_open()
        assert stand.role.restored == {B.next: [0, 1]}

    virtually(rule)


def test_only_an_active_checkpoint_can_be_renewed(tmp_path: Path) -> None:
    async def rule() -> None:
        await refused("invalid_phase", Stand(tmp_path).renew(X))

    virtually(rule)


def test_the_status_says_what_a_controller_must_know(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        stand.role.start(B, restart=True)
        await stand.retire(X, EpisodeId("gone", 3))
        status = await stand.participant.status()
        assert (status.kind, status.instance, status.phase) == ("environment", "counter", "idle")
        assert (status.checkpoint_id, status.lease_expires_at) == (None, None)
        assert status.retired_rollouts == 1
        assert status.restored_pending == 0
        assert status.boot_id == "boot"
        assert status.report.restarts == ["b"]
        assert {"restore_later_attempt", "probe", "needs_by_episode"} <= set(status.extensions)
        assert status.counters == {"retired": 1}

    virtually(rule)


def test_a_report_names_at_most_100_blockers_and_every_restart(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        for number in range(300):
            stand.role.start(EpisodeId(f"r{number:03}"), restart=True)
            stand.role.gate._add(f"e{number:03}", 1)
        reply = await stand.prepare(X, seconds=1)
        assert reply.report.blocker_count == 300
        assert reply.report.blockers == [f"e{number:03}" for number in range(100)]
        assert len(reply.report.restarts) == 300

    virtually(rule)


def test_restarts_do_not_block_and_their_set_is_frozen_by_prepare(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        stand.role.start(B, restart=True)
        async with busy(stand.role, B, 1000.0):
            reply = await stand.prepare(X)
            assert (reply.phase, reply.report.restarts) == ("prepared", ["b"])
            stand.role.end(B)
            assert (await stand.participant.status()).report.restarts == ["b"]

    virtually(rule)


def test_an_event_is_one_line_of_json_with_names_and_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        with caplog.at_level("INFO", "gymckpt.participant"):
            await stand.checkpoint(X)
            await refused("stale_checkpoint", stand.prepare(X))

    virtually(rule)
    events = [record.__dict__["event"] for record in caplog.records]
    assert [event["event"] for event in events] == ["prepared", "committed", "resumed", "refused.stale_checkpoint"]
    assert all(event["instance"] == "counter" for event in events)
    assert all("\n" not in record.getMessage() and record.getMessage().startswith("{") for record in caplog.records)


def test_a_participant_that_failed_to_restore_can_take_part_in_a_checkpoint(tmp_path: Path) -> None:
    async def rule() -> None:
        first = Stand(tmp_path)
        await started(first, A)
        await first.checkpoint(X)
        stand = Stand(tmp_path, BrokenInstallRole())
        with pytest.raises(RuntimeError, match="bug"):
            await stand.restore(Y, X, [A])
        assert stand.is_open()
        await started(stand, B)
        assert (await stand.checkpoint(Z)).episode_ids == ["b"]

    virtually(rule)
