"""What a commit writes, when, and what it leaves behind."""

import asyncio
import threading
from functools import partial
from pathlib import Path

import pytest

from gymckpt import crashpoints
from gymckpt.identity import EpisodeId, Kind
from gymckpt.ports import SystemClock, ThreadOffload
from tests.participant.held import FailingFileSystem, HeldManifestFileSystem, HeldOffload
from tests.participant.roles import CounterRole, HeldHooksRole, StubbornRole, busy
from tests.participant.stand import GRACE_S, A, B, C, Stand, X, Y, Z, refused, soon, started, virtually, written


def test_a_null_scope_means_everything_but_restarts(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A, B)
        stand.role.start(C, restart=True)
        reply = await stand.checkpoint(X)
        assert reply.episode_ids == ["a", "b"]
        assert await written(stand, X) == {"a": [0, 1], "b": [0, 1]}

    virtually(rule)


def test_only_scoped_episodes_are_written_and_one_that_is_not_held_is_simply_not_listed(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A, B)
        reply = await stand.checkpoint(X, [A, C, B.next])
        assert reply.episode_ids == ["a"]
        assert await written(stand, X) == {"a": [0, 1]}

    virtually(rule)


def test_a_model_server_refuses_a_null_scope_and_lists_its_staging_keys(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path, CounterRole("model", "policy"))
        await started(stand, A)
        await stand.prepare(X)
        await refused("checkpoint_error", stand.commit(X, None))
        reply = await stand.commit(X, [A])
        assert reply.staging_keys == ["stage-a"]
        assert reply.staging_keys_by_episode == {"a": ["stage-a"]}
        assert reply.needs_by_episode is None

    virtually(rule)


def test_a_scope_that_names_a_restart_is_refused_and_may_be_corrected(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        stand.role.start(B, restart=True)
        await stand.prepare(X)
        error = await refused("restart_in_scope", stand.commit(X, [A, B]))
        assert "b" in error.detail
        assert stand.manifests() == []
        assert (await stand.commit(X, [A])).episode_ids == ["a"]

    virtually(rule)


def test_a_commit_checks_again_that_nothing_blocks(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        await stand.prepare(X)
        with stand.role.gate.in_flight("a"):
            error = await refused("checkpoint_error", stand.commit(X))
            assert "a" in error.detail
            assert stand.role.exports == 0
        assert (await stand.commit(X)).episode_ids == ["a"]

    virtually(rule)


def test_owners_say_what_the_remaining_steps_need_and_null_where_there_is_no_boundary(tmp_path: Path) -> None:
    async def rule(kind: Kind) -> None:
        stand = Stand(tmp_path / kind, CounterRole(kind, "counter"))
        await started(stand, A)
        await started(stand, B, bumps=0)
        reply = await stand.checkpoint(X, [A, B])
        owner = kind in ("environment", "agent")
        assert reply.needs_by_episode == ({"a": [("resources", "tools")], "b": None} if owner else None)

    for kind in ("environment", "agent", "resources"):
        virtually(partial(rule, kind))


def test_what_a_failed_retire_has_left_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A, B)
        stand.participant.marks.raise_mark(A)
        assert (await stand.checkpoint(X)).episode_ids == ["b"]

    virtually(rule)


def test_a_retry_of_a_failed_write_stores_the_first_export(tmp_path: Path) -> None:
    async def rule() -> None:
        fs = FailingFileSystem()
        stand = Stand(tmp_path, fs=fs)
        await started(stand, A)
        await stand.prepare(X)
        fs.failing = True
        error = await refused("invalid_checkpoint_state", stand.commit(X))
        assert "Read-only file system" in error.detail
        assert stand.manifests() == []
        fs.failing = False
        stand.role.counts[A].append(99)
        assert (await stand.commit(X)).phase == "committed"
        assert stand.role.exports == 1
        assert await written(stand, X) == {"a": [0, 1]}

    virtually(rule)


def test_a_write_that_outlives_the_deadline_goes_on_and_a_retry_awaits_it(tmp_path: Path) -> None:
    async def rule() -> None:
        offload = HeldOffload()
        stand = Stand(tmp_path, offload=offload)
        await started(stand, A)
        await stand.prepare(X)
        offload.hold()
        asyncio.get_running_loop().call_later(50, offload.let_go)
        early = asyncio.create_task(stand.commit(X, [A], seconds=10))
        await asyncio.sleep(1)
        assert not early.done()
        await refused("deadline_exceeded", early)
        assert stand.clock.monotonic() == pytest.approx(10)
        await refused("checkpoint_conflict", stand.commit(X, [A, B], seconds=100))
        reply = await stand.commit(X, [A], seconds=100)
        assert reply.phase == "committed"
        assert stand.clock.monotonic() == pytest.approx(50)
        assert stand.role.exports == 1

    virtually(rule)


def test_a_held_export_is_bound_to_its_first_arguments(tmp_path: Path) -> None:
    async def rule() -> None:
        offload = HeldOffload()
        stand = Stand(tmp_path, offload=offload)
        await started(stand, A, B)
        await stand.prepare(X)
        writing = asyncio.create_task(stand.commit(X, [A]))
        await stand.role.exported.wait()
        offload.hold()
        await refused("deadline_exceeded", writing)
        await refused("deadline_exceeded", stand.commit(X, [A], seconds=5))
        asyncio.get_running_loop().call_later(5, offload.let_go)
        again = asyncio.create_task(stand.commit(X, [A], seconds=30))
        assert (await again).episode_ids == ["a"]
        await refused("checkpoint_conflict", stand.commit(X, [B]))

    virtually(rule)


def test_two_calls_of_one_commit_at_once_write_once_and_get_one_answer(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        await stand.prepare(X)
        first, second = await asyncio.gather(stand.commit(X), stand.commit(X))
        assert first == second
        assert stand.role.exports == 1

    virtually(rule)


def test_nothing_appears_after_a_resume_however_far_the_write_had_come(tmp_path: Path) -> None:
    async def rule(steps: int) -> bool:
        offload = HeldOffload()
        stand = Stand(tmp_path / str(steps), offload=offload)
        await started(stand, A, B)
        await stand.prepare(X)
        writing = asyncio.create_task(stand.commit(X, seconds=5))
        for _ in range(steps):
            await asyncio.sleep(0)
        committed = stand.participant.phase == "committed"
        offload.hold()
        await asyncio.wait([writing])
        resuming = asyncio.create_task(stand.resume(X))
        await soon()
        offload.let_go()
        await resuming
        before = stand.manifests()
        await asyncio.sleep(100)
        assert stand.manifests() == before
        assert stand.is_open()
        assert stand.temporaries() == []
        return committed

    assert next(steps for steps in range(1000) if virtually(partial(rule, steps))) > 10


def test_a_resume_while_a_thread_gives_the_manifest_its_name_leaves_no_doubt(tmp_path: Path) -> None:
    async def rule() -> None:
        fs = HeldManifestFileSystem()
        stand = Stand(tmp_path, fs=fs, offload=ThreadOffload())
        stand.participant._state.clock = SystemClock()
        stand.participant._state.lease._clock = SystemClock()
        stand.clock = SystemClock()  # type: ignore[assignment]
        await started(stand, A)
        await stand.prepare(X)
        writing = asyncio.create_task(stand.commit(X))
        assert await asyncio.to_thread(fs.reached.wait, 20)
        resuming = asyncio.create_task(stand.resume(X))
        threading.Timer(0.05, fs.let_go.set).start()
        await resuming
        after = stand.manifests()
        await refused("stale_checkpoint", writing)
        await stand.participant.close()
        assert stand.manifests() == after
        assert stand.is_open()

    asyncio.run(rule())


def test_state_restored_earlier_but_outside_the_scope_is_dropped_without_a_fence(tmp_path: Path) -> None:
    async def rule() -> None:
        first = Stand(tmp_path)
        await started(first, A, B)
        await first.checkpoint(X)
        stand = Stand(tmp_path)
        await stand.restore(Y, X, [A, B])
        await stand.resume(Y)
        reply = await stand.checkpoint(Z, [A.next])
        assert reply.episode_ids == ["a-a1"]
        assert stand.role.restored == {A.next: [0, 1]}
        assert not stand.role.marks.refuses(B.next)

    virtually(rule)


def test_a_null_scope_drops_nothing(tmp_path: Path) -> None:
    async def rule() -> None:
        first = Stand(tmp_path)
        await started(first, A)
        await first.checkpoint(X)
        stand = Stand(tmp_path)
        await stand.restore(Y, X, [A])
        await stand.resume(Y)
        assert (await stand.checkpoint(Z)).episode_ids == ["a-a1"]
        assert stand.role.restored == {A.next: [0, 1]}

    virtually(rule)


def test_stop_suspends_compute_and_resume_wakes_it(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A, B)
        await stand.prepare(X)
        await stand.commit(X, [A], stop=True)
        assert stand.role.suspended == {A}
        await stand.resume(X)
        assert stand.role.suspended == set()

    virtually(rule)


def test_the_end_of_the_lease_wakes_suspended_compute(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        await stand.prepare(X)
        await stand.commit(X, stop=True)
        await asyncio.sleep(30 + GRACE_S + 1)
        assert stand.role.suspended == set()
        assert stand.is_open()

    virtually(rule)


@pytest.mark.parametrize("fails", [True, False])
def test_hooks_that_fail_or_hang_hold_up_neither_commit_nor_resume_for_long(tmp_path: Path, fails: bool) -> None:
    async def rule() -> None:
        role = HeldHooksRole()
        role.fails = fails
        stand = Stand(tmp_path, role)
        await started(stand, A)
        await stand.prepare(X)
        assert (await stand.commit(X, stop=True, seconds=100)).phase == "committed"
        await stand.resume(X, seconds=100)
        assert stand.is_open()
        assert stand.participant.counters["suspend_failed"] == stand.participant.counters["wake_failed"] == 1
        await stand.participant.close()

    virtually(rule)


def test_a_second_checkpoint_appends_and_reads_back_whole(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        await stand.checkpoint(X)
        await stand.role.bump(A)
        await stand.checkpoint(Y)
        assert await written(stand, X) == {"a": [0, 1]}
        assert await written(stand, Y) == {"a": [0, 1, 2]}

    virtually(rule)


@pytest.mark.parametrize("point", ["commit.before_export", "commit.after_export", "commit.after_manifest"])
@pytest.mark.parametrize("action", ["error", "enospc", "eio"])
def test_an_error_at_any_point_fails_the_call_and_a_retry_succeeds(tmp_path: Path, point: str, action: str) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        await stand.prepare(X)
        crashpoints.arm(f"{point}:{action}")
        try:
            with pytest.raises((OSError, Exception)):
                await stand.commit(X)
        finally:
            crashpoints.arm(None)
        assert stand.participant.phase == "prepared"
        assert (await stand.commit(X)).episode_ids == ["a"]
        assert await written(stand, X) == {"a": [0, 1]}

    virtually(rule)


def test_blocked_work_goes_on_after_resume(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        await stand.prepare(X)
        async with busy(stand.role, A, 0.0) as bump:
            await asyncio.sleep(10)
            assert not bump.done()
            assert (await stand.commit(X)).episode_ids == ["a"]
            await stand.resume(X)
            assert await bump == 3
        assert await written(stand, X) == {"a": [0, 1]}
        assert stand.role.counts[EpisodeId("a")] == [0, 1, 2]

    virtually(rule)


def test_an_export_that_never_ends_keeps_nothing_closed_and_never_reaches_the_disk(tmp_path: Path) -> None:
    async def rule() -> None:
        role = StubbornRole()
        stand = Stand(tmp_path, role)
        await started(stand, A)
        await stand.prepare(X)
        committing = asyncio.create_task(stand.commit(X, seconds=100))
        await role.began.wait()
        await stand.resume(X, seconds=100)
        await refused("stale_checkpoint", committing)
        assert stand.is_open()
        assert stand.participant.counters["left_running"] == 1
        role.let_go.set()
        await stand.checkpoint(Y)
        assert [path.relative_to(tmp_path).parts[0] for path in stand.manifests()] == [Y]

    virtually(rule)
