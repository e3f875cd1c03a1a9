"""Restores that fail, stall, or meet another operation."""

import asyncio
from pathlib import Path

import pytest

from gymckpt import crashpoints
from gymckpt.identity import EpisodeId
from tests.participant.held import HeldOffload
from tests.participant.roles import BrokenInstallRole, HeldInstallRole, StubbornRole
from tests.participant.stand import GRACE_S, A, B, C, Stand, X, Y, Z, refused, soon, started, stored, virtually


def test_a_record_is_installed_as_the_attempt_after_the_named_one(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A, B)
        stand = Stand(tmp_path)
        reply = await stand.restore(Y, X, [A])
        assert reply.source_checkpoint_id == X
        assert reply.restored == ["a-a1"]
        assert stand.role.restored == {A.next: [0, 1]}
        await stand.resume(Y)
        stand.role.start(A.next)
        assert await stand.role.bump(A.next) == 3

    virtually(rule)


def test_once_a_later_attempt_is_installed_every_earlier_one_is_refused(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        stand = Stand(tmp_path)
        await stand.restore(Y, X, [EpisodeId("a", 4), EpisodeId("c", 1)])
        await stand.resume(Y)
        for attempt in range(5):
            assert stand.role.marks.refuses(EpisodeId("a", attempt))
        assert not stand.role.marks.refuses(EpisodeId("a", 5))
        assert stand.role.marks.refuses(EpisodeId("c", 1))
        assert not stand.role.marks.refuses(EpisodeId("c", 2))

    virtually(rule)


def test_a_new_attempt_that_was_already_retired_here_is_not_installed(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        stand = Stand(tmp_path)
        await stand.retire(Y, A.next)
        await refused("stale_attempt", stand.restore(Z, X, [A]))
        assert stand.is_open()
        assert stand.role.restored == {}

    virtually(rule)


def test_one_bad_record_installs_nothing_and_leaves_admission_open(tmp_path: Path) -> None:
    async def rule() -> None:
        first = Stand(tmp_path)
        await started(first, A, C)
        await started(first, B, bumps=14)  # a count of 13 is one that the role refuses
        await first.checkpoint(X)
        stand = Stand(tmp_path)
        error = await refused("invalid_checkpoint_state", stand.restore(Y, X, [A, B, C]))
        assert "b" in error.detail
        assert stand.role.restored == {}
        assert stand.is_open()
        assert (await stand.restore(Y, X, [A, C])).restored == ["a-a1", "c-a1"]

    virtually(rule)


def test_admission_stays_open_while_records_are_read_and_a_new_episode_makes_the_restore_fail(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        offload = HeldOffload()
        stand = Stand(tmp_path, offload=offload)
        offload.hold()
        restoring = asyncio.create_task(stand.restore(Y, X, [A]))
        await soon()
        assert stand.is_open()
        await started(stand, B)
        offload.let_go()
        await refused("checkpoint_error", restoring)
        assert stand.role.restored == {}
        assert stand.is_open()

    virtually(rule)


def test_a_restore_that_still_reads_at_its_deadline_is_given_up_at_once(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        offload = HeldOffload()
        stand = Stand(tmp_path, offload=offload)
        offload.hold()
        await refused("deadline_exceeded", stand.restore(Y, X, [A], seconds=10))
        await soon()
        assert stand.is_open()
        assert stand.participant._state.active is None
        offload.let_go()
        await asyncio.sleep(1)
        assert stand.role.restored == {}
        assert (await stand.restore(Y, X, [A])).restored == ["a-a1"]

    virtually(rule)


def test_a_failed_install_leaves_nothing_and_opens_admission(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A, B)
        stand = Stand(tmp_path, BrokenInstallRole())
        with pytest.raises(RuntimeError, match="bug"):
            await stand.restore(Y, X, [A, B])
        assert stand.role.restored == {}
        assert stand.is_open()
        assert stand.participant.counters["restore_failed"] == 1

    virtually(rule)


def test_after_an_install_that_outlived_its_deadline_admission_opens_only_once_it_has_ended(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        role = HeldInstallRole()
        stand = Stand(tmp_path, role)
        await refused("deadline_exceeded", stand.restore(Y, X, [A], seconds=10))
        await asyncio.sleep(10)
        assert stand.participant.phase != "idle"
        assert not role.gate.is_open
        await refused("deadline_exceeded", stand.restore(Y, X, [A], seconds=10))
        role.let_go.set()
        await soon()
        assert stand.is_open()
        assert role.restored == {}
        assert (await stand.restore(Y, X, [A])).restored == ["a-a1"]

    virtually(rule)


def test_a_retire_waits_for_an_install_and_then_frees_what_it_put_there(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        role = HeldInstallRole()
        stand = Stand(tmp_path, role)
        restoring = asyncio.create_task(stand.restore(Y, X, [A], seconds=100))
        await role.installing.wait()
        await refused("deadline_exceeded", stand.retire(Y, A.next, seconds=10))
        assert role.marks.refuses(A.next)
        retiring = asyncio.create_task(stand.retire(Y, A.next))
        await soon()
        assert not retiring.done()
        role.let_go.set()
        assert (await retiring).retired == ["a-a1"]
        assert (await restoring).phase == "restored"
        assert role.restored == {}
        await stand.resume(Y)
        assert stand.is_open()

    virtually(rule)


def test_a_resume_during_an_install_waits_for_it_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        role = HeldInstallRole()
        stand = Stand(tmp_path, role)
        restoring = asyncio.create_task(stand.restore(Y, X, [A], seconds=100))
        await role.installing.wait()
        await refused("deadline_exceeded", stand.resume(Y, seconds=5))
        await refused("stale_checkpoint", restoring)
        assert not role.gate.is_open
        resuming = asyncio.create_task(stand.resume(Y))
        await soon()
        role.let_go.set()
        assert (await resuming).phase == "idle"
        assert stand.is_open()
        assert role.restored == {}

    virtually(rule)


def test_a_resume_after_a_failed_restore_fences_its_id(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await refused("invalid_checkpoint_state", stand.restore(Y, X, [A]))
        await stand.resume(Y)
        await refused("stale_checkpoint", stand.restore(Y, X, [A]))

    virtually(rule)


def test_the_end_of_the_lease_opens_a_restored_participant_and_keeps_what_it_holds(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        stand = Stand(tmp_path)
        await stand.restore(Y, X, [A])
        await asyncio.sleep(30 + GRACE_S + 1)
        assert stand.is_open()
        assert stand.role.restored == {A.next: [0, 1]}

    virtually(rule)


def test_two_calls_of_one_restore_at_once_install_once(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        stand = Stand(tmp_path)
        first, second = await asyncio.gather(stand.restore(Y, X, [A]), stand.restore(Y, X, [A]))
        assert first == second
        assert stand.participant.counters["restored"] == 1

    virtually(rule)


def test_an_operation_of_another_kind_during_a_restore_is_refused(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        role = HeldInstallRole()
        stand = Stand(tmp_path, role)
        restoring = asyncio.create_task(stand.restore(Y, X, [A]))
        await role.installing.wait()
        await refused("invalid_phase", stand.prepare(Y))
        await refused("invalid_phase", stand.commit(Y))
        await refused("checkpoint_conflict", stand.prepare(Z))
        await refused("checkpoint_conflict", stand.restore(Y, X, [A, B]))
        role.let_go.set()
        await restoring

    virtually(rule)


@pytest.mark.parametrize("point", ["restore.after_validate", "restore.before_install", "restore.after_install"])
def test_an_error_at_any_point_leaves_it_open_and_empty_and_a_retry_succeeds(tmp_path: Path, point: str) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        stand = Stand(tmp_path)
        crashpoints.arm(f"{point}:error")
        try:
            with pytest.raises(crashpoints.CrashPointError):
                await stand.restore(Y, X, [A])
        finally:
            crashpoints.arm(None)
        assert stand.is_open()
        assert stand.role.restored == {}
        assert (await stand.restore(Y, X, [A])).restored == ["a-a1"]

    virtually(rule)


def test_an_install_that_never_ends_keeps_nothing_closed_and_what_it_installs_late_is_dropped(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        role = StubbornRole()
        stand = Stand(tmp_path, role)
        restoring = asyncio.create_task(stand.restore(Y, X, [A]))
        await role.began.wait()
        await stand.resume(Y, seconds=100)
        await refused("stale_checkpoint", restoring)
        assert stand.is_open()
        assert role.marks.refuses(A.next)
        assert stand.participant.counters["left_running"] == 1
        await refused("checkpoint_error", stand.restore(Z, X, [A.next]))
        role.let_go.set()
        await asyncio.sleep(1.0)
        assert role.restored == {}
        assert (await stand.restore(Z, X, [A.next])).restored == ["a-a2"]

    virtually(rule)
