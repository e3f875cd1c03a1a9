"""When a restore is taken, what it installs, and what a failed one leaves."""

import asyncio
import shutil
from pathlib import Path

import pytest

from gymckpt import crashpoints
from gymckpt.identity import EpisodeId
from tests.participant.held import HeldOffload
from tests.participant.roles import BrokenInstallRole, CounterRole, HeldInstallRole, busy
from tests.participant.stand import GRACE_S, A, B, C, Stand, X, Y, Z, refused, soon, started, virtually


async def stored(root: Path, *episodes: EpisodeId) -> None:
    """Checkpoint X with `episodes`, each bumped twice."""
    stand = Stand(root)
    await started(stand, *episodes)
    await stand.checkpoint(X)


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


def test_the_record_of_an_earlier_attempt_goes_on_as_the_one_after_the_last_dispatched(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, EpisodeId("a", 2))
        stand = Stand(tmp_path)
        assert (await stand.restore(Y, X, [EpisodeId("a", 7)])).restored == ["a-a8"]
        assert stand.role.restored == {EpisodeId("a", 8): [0, 1]}

    virtually(rule)


def test_of_several_records_of_a_rollout_the_highest_not_above_the_named_one_is_taken(tmp_path: Path) -> None:
    async def rule() -> None:
        first = Stand(tmp_path)
        await started(first, A, bumps=1)
        await started(first, EpisodeId("a", 2), bumps=2)
        await started(first, EpisodeId("a", 5), bumps=3)
        await first.checkpoint(X)
        stand = Stand(tmp_path)
        assert (await stand.restore(Y, X, [EpisodeId("a", 4)])).restored == ["a-a5"]
        assert stand.role.restored == {EpisodeId("a", 5): [0, 1]}

    virtually(rule)


def test_a_record_of_a_later_attempt_than_the_named_one_is_not_restored(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, EpisodeId("a", 3))
        stand = Stand(tmp_path)
        assert (await stand.restore(Y, X, [EpisodeId("a", 2), C])).restored == []
        assert stand.role.restored == {}

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


def test_a_restored_participant_that_was_never_claimed_from_is_still_in_the_next_checkpoint(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        stand = Stand(tmp_path)
        await stand.restore(Y, X, [A])
        await stand.resume(Y)
        await stand.checkpoint(Z)
        third = Stand(tmp_path)
        assert (await third.restore("r", Z, [A.next])).restored == ["a-a2"]

    virtually(rule)


def test_a_server_with_live_episodes_is_not_restored_into(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        stand = Stand(tmp_path)
        await started(stand, B)
        error = await refused("checkpoint_error", stand.restore(Y, X, [A]))
        assert "b" in error.detail
        assert stand.is_open()

    virtually(rule)


def test_restored_but_unclaimed_state_must_be_retired_before_the_next_restore(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        stand = Stand(tmp_path)
        await stand.restore(Y, X, [A])
        await stand.resume(Y)
        await refused("checkpoint_error", stand.restore(Z, X, [A.next]))
        await stand.retire("r", A.next)
        assert (await stand.restore(Z, X, [A.next])).restored == ["a-a2"]

    virtually(rule)


def test_an_emptied_server_can_be_restored_into_whether_rollouts_were_retired_or_ended(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A, B)
        await stand.checkpoint(X)
        await stand.retire(Y, A)
        stand.role.end(B)
        assert (await stand.restore(Z, X, [A, B])).restored == ["a-a1", "b-a1"]

    virtually(rule)


def test_an_unfinished_retire_keeps_a_server_from_counting_as_emptied(tmp_path: Path) -> None:
    class SlowRetire(CounterRole):
        async def retire(self, episode: EpisodeId) -> None:
            await super().retire(episode)
            await asyncio.sleep(100)

    async def rule() -> None:
        await stored(tmp_path, A)
        stand = Stand(tmp_path, SlowRetire())
        await started(stand, A)
        await refused("deadline_exceeded", stand.retire(Y, A, seconds=1))
        await refused("checkpoint_error", stand.restore(Z, X, [A]))
        await asyncio.sleep(100)
        assert (await stand.restore(Z, X, [A])).restored == ["a-a1"]

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


def damage(part: Path, fault: str) -> CounterRole:
    """Bring `fault` about; the role that is to be restored from `part`, or from where it was moved."""
    match fault:
        case "missing":
            shutil.rmtree(part)
        case "manifest":
            (part / "manifest.json").write_bytes(b'{"schema_version"')
        case "segment":
            segment = next(part.glob("segment-*"))
            data = bytearray(segment.read_bytes())
            data[len(data) // 2] ^= 1
            segment.write_bytes(data)
        case "foreign kind":
            part.parent.rename(part.parent.parent / "agent")
            return CounterRole("agent")
        case "foreign instance":
            part.rename(part.parent / "other")
            return CounterRole("environment", "other")
    return CounterRole()


@pytest.mark.parametrize("fault", ["missing", "manifest", "segment", "foreign kind", "foreign instance"])
def test_a_missing_damaged_or_foreign_directory_restores_nothing(tmp_path: Path, fault: str) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        stand = Stand(tmp_path, damage(tmp_path / X / "gym" / "environment" / "counter", fault))
        await refused("invalid_checkpoint_state", stand.restore(Y, X, [A]))
        assert stand.is_open()
        assert stand.role.restored == {}

    virtually(rule)


def test_a_directory_outside_the_root_is_not_read(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path / "elsewhere", A)
        stand = Stand(tmp_path / "root")
        await refused("invalid_checkpoint_state", stand.restore(Y, str(tmp_path / "elsewhere" / X), [A]))
        assert stand.is_open()

    virtually(rule)


def test_a_rollout_is_named_once(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        await refused("checkpoint_error", Stand(tmp_path).restore(Y, X, [A, A.next]))

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


def test_a_checkpoint_after_a_restore_holds_what_happened_since(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A, B)
        stand = Stand(tmp_path)
        await stand.restore(Y, X, [A, B])
        await stand.resume(Y)
        stand.role.start(A.next)
        await stand.role.bump(A.next)
        await stand.checkpoint(Z)
        third = Stand(tmp_path)
        await third.restore("r", Z, [A.next, B.next])
        assert third.role.restored == {EpisodeId("a", 2): [0, 1, 2], EpisodeId("b", 2): [0, 1]}

    virtually(rule)


def test_work_of_a_refused_attempt_that_waited_at_the_gate_is_refused_when_it_opens(tmp_path: Path) -> None:
    async def rule() -> None:
        await stored(tmp_path, A)
        stand = Stand(tmp_path)
        await stand.restore(Y, X, [A])
        async with busy(stand.role, A, 0.0) as straggler:
            await soon()
            assert not straggler.done()
            await stand.resume(Y)
            await refused("stale_attempt", straggler)

    virtually(rule)
