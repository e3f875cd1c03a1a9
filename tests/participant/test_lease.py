"""Deadlines and the lease."""

import asyncio
from pathlib import Path

import pytest

from gymckpt.wire.control import MAX_DEADLINE_S
from tests.participant.roles import busy
from tests.participant.stand import GRACE_S, A, B, Stand, X, Y, refused, started, virtually


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
