"""Phases, fence and results of one participant."""

import asyncio
from pathlib import Path

import pytest

from gymckpt import crashpoints
from gymckpt.crashpoints import CrashPointError
from gymckpt.identity import new_checkpoint_id
from gymckpt.participant.phases import FENCED_IDS
from tests.participant.roles import BrokenInstallRole, CounterRole, busy
from tests.participant.stand import A, B, Stand, X, Y, Z, refused, soon, started, virtually


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
