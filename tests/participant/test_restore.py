"""When a restore is taken, what it installs, and what a bad checkpoint leaves."""

import asyncio
import shutil
from pathlib import Path

import pytest

from gymckpt.identity import EpisodeId
from tests.participant.roles import CounterRole, busy
from tests.participant.stand import A, B, C, Stand, X, Y, Z, refused, soon, started, stored, virtually


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
