"""Retire and forget."""

import asyncio
from pathlib import Path

import pytest

from gymckpt import crashpoints
from gymckpt.identity import EpisodeId
from tests.participant.roles import CounterRole, busy
from tests.participant.stand import A, B, Stand, X, Y, Z, refused, soon, started, virtually


class SlowRetireRole(CounterRole):
    """Freeing an episode takes 20 s; counts how often it is asked to."""

    calls = 0
    fails = False

    async def retire(self, episode: EpisodeId) -> None:
        self.calls += 1
        await asyncio.sleep(20)
        if self.fails:
            raise RuntimeError("bug")
        await super().retire(episode)


def test_after_a_retire_the_attempt_and_every_earlier_one_is_refused_and_nothing_of_them_is_left(
    tmp_path: Path,
) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A, A.next, EpisodeId("a", 3), B)
        reply = await stand.retire(X, A.next)
        assert reply.retired == ["a-a1"]
        assert set(stand.role.counts) == {EpisodeId("a", 3), B}
        for episode in (A, A.next):
            await refused("stale_attempt", stand.role.bump(episode))
        assert await stand.role.bump(EpisodeId("a", 3)) == 3

    virtually(rule)


def test_a_retire_raises_its_marks_first(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path, SlowRetireRole())
        await started(stand, A)
        retiring = asyncio.create_task(stand.retire(X, A))
        await soon()
        assert not retiring.done()
        await refused("stale_attempt", stand.role.bump(A))
        await retiring

    virtually(rule)


def test_a_retire_stops_running_work_once_and_waits_for_its_clean_up(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        cleaned: list[float] = []

        async def work() -> None:
            try:
                await stand.role.bump(A, takes_s=1000)
            finally:
                await asyncio.sleep(7)
                cleaned.append(stand.clock.monotonic())

        task = asyncio.create_task(work())
        await soon()
        await refused("deadline_exceeded", stand.retire(X, A, seconds=3))
        await stand.retire(X, A)
        assert cleaned == [pytest.approx(7)]
        assert task.cancelled()

    virtually(rule)


def test_a_retire_is_refused_during_a_checkpoint_and_raises_no_mark(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        await stand.prepare(X)
        for _ in range(2):
            await refused("invalid_phase", stand.retire(X, A))
            await refused("invalid_phase", stand.forget(X, "a"))
            await stand.commit(X)
        assert not stand.role.marks.refuses(A)

    virtually(rule)


def test_restored_episodes_are_retired_while_restored(tmp_path: Path) -> None:
    async def rule() -> None:
        first = Stand(tmp_path)
        await started(first, A, B)
        await first.checkpoint(X)
        stand = Stand(tmp_path)
        await stand.restore(Y, X, [A, B])
        assert (await stand.retire(Y, A.next)).retired == ["a-a1"]
        assert set(stand.role.restored) == {B.next}
        assert stand.participant.phase == "restored"

    virtually(rule)


def test_the_mark_stays_when_the_retire_fails_and_a_retry_frees(tmp_path: Path) -> None:
    async def rule() -> None:
        role = SlowRetireRole()
        role.fails = True
        stand = Stand(tmp_path, role)
        await started(stand, A)
        with pytest.raises(RuntimeError, match="bug"):
            await stand.retire(X, A)
        assert role.marks.refuses(A)
        role.fails = False
        assert (await stand.retire(X, A)).retired == ["a"]
        assert role.counts == {}

    virtually(rule)


def test_an_interrupted_retire_leaves_its_work_tracked_and_a_retry_awaits_it(tmp_path: Path) -> None:
    async def rule() -> None:
        role = SlowRetireRole()
        stand = Stand(tmp_path, role)
        await started(stand, A)
        error = await refused("deadline_exceeded", stand.retire(X, A, seconds=5))
        assert "a" in error.detail
        assert (await stand.retire(X, A)).retired == ["a"]
        assert stand.clock.monotonic() == pytest.approx(20)
        assert role.calls == 1

    virtually(rule)


def test_a_retire_of_a_later_attempt_begins_when_the_one_under_way_has_ended(tmp_path: Path) -> None:
    async def rule() -> None:
        role = SlowRetireRole()
        stand = Stand(tmp_path, role)
        await started(stand, A, A.next)
        await asyncio.gather(stand.retire(X, A, seconds=100), stand.retire(X, A.next, seconds=100))
        assert stand.clock.monotonic() == pytest.approx(40)
        assert role.counts == {}

    virtually(rule)


def test_retiring_what_is_not_here_still_refuses_it(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        assert (await stand.retire(X, A, B.next)).retired == ["a", "b-a1"]
        await refused("stale_attempt", stand.role.bump(A))
        assert (await stand.participant.status()).retired_rollouts == 2

    virtually(rule)


def test_a_retired_episode_is_in_no_later_checkpoint(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A, B)
        await stand.retire(X, A)
        assert (await stand.checkpoint(Y, [A, B])).episode_ids == ["b"]

    virtually(rule)


def test_forget_drops_the_mark_of_a_rollout_that_has_nothing_left(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        await stand.retire(X, A)
        assert (await stand.forget(X, "a", "never-seen", "a")).forgotten == ["a", "never-seen"]
        assert stand.role.marks.count == 0
        assert (await stand.forget(X, "a")).forgotten == ["a"]

    virtually(rule)


def test_forget_keeps_the_mark_of_a_rollout_that_still_has_an_attempt(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path, SlowRetireRole())
        await started(stand, A.next, B)
        await stand.retire(X, A)
        await refused("deadline_exceeded", stand.retire(X, B, seconds=1))
        assert (await stand.forget(X, "a", "b")).forgotten == []
        assert stand.role.marks.refuses(A)
        assert stand.role.marks.refuses(B)

    virtually(rule)


def test_a_checkpoint_that_closes_before_a_retire_has_begun_refuses_it_but_the_mark_is_up(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A, B)
        async with busy(stand.role, B, 10.0):
            retiring = asyncio.create_task(stand.retire(Y, A))
            preparing = asyncio.create_task(stand.prepare(X))
            await refused("invalid_phase", retiring)
            assert stand.role.marks.refuses(A)
            assert (await preparing).phase == "prepared"
        assert (await stand.commit(X)).episode_ids == ["b"]
        await stand.resume(X)
        assert (await stand.retire(Y, A)).retired == ["a"]

    virtually(rule)


@pytest.mark.parametrize("point", ["retire.after_mark", "retire.after_free"])
def test_an_error_at_any_point_leaves_the_marks_up(tmp_path: Path, point: str) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        crashpoints.arm(f"{point}:error")
        try:
            with pytest.raises(crashpoints.CrashPointError):
                await stand.retire(Z, A)
        finally:
            crashpoints.arm(None)
        assert stand.role.marks.refuses(A)
        assert (await stand.retire(Z, A)).retired == ["a"]

    virtually(rule)
