"""A checkpoint that fails publishes nothing, opens every server and lets the run go on."""

import asyncio
from pathlib import Path

import pytest

from gymckpt import coordination, crashpoints
from gymckpt.collection import events
from gymckpt.collection.checkpointing import (
    LAST_RESUME_S,
    CheckpointNotTaken,
    CheckpointTaken,
)
from gymckpt.errors import NotAsAsked
from tests.collection.checkpointed import R1, R2, Run, play, restarted
from tests.participant.roles import busy
from tests.simulation.counters import TOKEN
from tests.simulation.transport import Fault


def test_a_missed_prepare_publishes_nothing_names_who_blocks_and_the_run_goes_on(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        first = await run.taken()
        async with busy(run.servers.roles["agent"], R1, 1000) as call:
            missed = await run.not_taken()
            assert missed.blockers == ("r1",)
            assert "agent agent" in missed.reason
            assert missed.retire is None
            assert (await run.newest()).checkpoint_id == first.checkpoint_id
            assert run.unpublished() == []
            assert not call.done()
        [failure] = run.host.said(events.CheckpointFailed)
        assert failure.checkpoint_id == missed.checkpoint_id

    play(tmp_path, story)


def test_a_rollout_that_alone_keeps_blocking_is_retired_for_it_once_and_then_its_ticks_are_skipped(
    tmp_path: Path,
) -> None:
    async def story(run: Run) -> None:
        async with busy(run.servers.roles["agent"], R1, 10_000):
            assert (await run.not_taken()).retire is None
            assert (await run.not_taken()).retire == R1
            assert [(await run.not_taken()).retire for _ in range(2)] == [None, None]
            asked = len(run.servers.network.exchanges)
            skipped = await run.not_taken()
            assert (skipped.checkpoint_id, skipped.blockers) == (None, ("r1",))
            assert len(run.servers.network.exchanges) == asked
            assert (await run.not_taken(stop=True)).checkpoint_id is not None
            run.host.flying.pop(R1)
            assert (await run.not_taken()).checkpoint_id is not None

    play(tmp_path, story)


@pytest.mark.parametrize("point", ["prepare.begun", "prepare.done", "commit.sent", "commit.done", "publish.before"])
@pytest.mark.parametrize("action", ["error", "enospc"])
def test_a_failure_anywhere_before_publishing_opens_every_server_and_the_last_checkpoint_stands(
    tmp_path: Path, point: str, action: str
) -> None:
    async def story(run: Run) -> None:
        first = await run.taken()
        crashpoints.arm(f"collector.{point}:{action}")
        failed = await run.not_taken()
        assert (await run.newest()).checkpoint_id == first.checkpoint_id
        assert len(run.unpublished()) == (0 if action == "enospc" or point.startswith("prepare") else 1)
        assert run.host.history().open_ids == frozenset()
        assert failed.retire is None
        second = await run.taken()
        assert (await run.newest()).checkpoint_id == second.checkpoint_id
        assert run.unpublished() == []

    play(tmp_path, story)


@pytest.mark.parametrize("point", ["publish.after", "resume.before", "resume.after"])
def test_what_is_published_stands_whatever_fails_afterwards(tmp_path: Path, point: str) -> None:
    async def story(run: Run) -> None:
        crashpoints.arm(f"collector.{point}:error")
        taken = await run.taken()
        assert (await run.newest()).checkpoint_id == taken.checkpoint_id

    play(tmp_path, story)


def test_at_most_one_unpublished_directory_is_kept(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        for _ in range(3):
            crashpoints.arm("collector.commit.done:error")
            failed = await run.not_taken()
            assert run.unpublished() == [failed.checkpoint_id]
        await run.taken()
        assert run.unpublished() == []

    play(tmp_path, story)


def test_one_commit_that_fails_fails_the_checkpoint(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        run.servers.network.faults.append(Fault("lost_request", "tools", "/commit", times=100))
        failed = await run.not_taken()
        assert "resources tools" in failed.reason

    play(tmp_path, story)


def test_a_server_started_again_while_a_checkpoint_is_open_fails_it(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        run.servers.network.faults.append(Fault("delay_reply", "agent", "/commit", delay_s=5.0))
        taking = asyncio.create_task(run.checkpointer.take())
        await asyncio.sleep(2.0)
        await run.servers.stop(["tools"])
        run.servers.start(["tools"])
        failed = await taking
        assert isinstance(failed, CheckpointNotTaken)
        assert [p.instance for p in failed.rebooted] == ["tools"]
        run.check_open()

    play(tmp_path, story)


def test_a_server_started_again_before_the_checkpoint_fails_it_until_the_deployment_is_new(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        await run.servers.stop(["tools"])
        run.servers.start(["tools"])
        failed = await run.not_taken()
        assert "resources tools" in failed.reason
        assert [p.instance for p in failed.rebooted] == ["tools"]
        servers = run.servers
        run.checkpointer.deployment = await coordination.discover(
            servers.servers, servers.network, TOKEN, servers.deadline()
        )
        await run.taken()
        assert restarted(await run.newest()) == {R1: "missing_in:tools", R2: "missing_in:tools"}

    play(tmp_path, story)


def test_a_collector_that_lost_its_lock_publishes_nothing_and_stops(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        run.host.lock_lost = True
        with pytest.raises(NotAsAsked):
            await run.checkpointer.take()
        run.check_open()
        assert (await run.directory.newest_valid(run.host.run_id))[0] is None

    play(tmp_path, story)


def test_cancelled_in_the_middle_it_still_opens_every_server(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        run.servers.network.faults.append(Fault("delay_reply", "agent", "/commit", delay_s=5.0))
        taking = asyncio.create_task(run.checkpointer.take())
        await asyncio.sleep(2.0)
        taking.cancel()
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        run.check_open()
        assert run.host.history().open_ids == frozenset()
        await run.taken()
        assert run.unpublished() == []

    play(tmp_path, story)


def test_a_last_checkpoint_keeps_its_deadline_and_tells_the_servers_that_work_ends(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        await run.taken(stop=True, name="the-end", deadline=run.servers.deadline(25))
        assert (await run.newest()).collection.name == "the-end"
        assert all(e.body["stop"] for e in run.servers.network.exchanges if e.path.endswith("/commit"))
        assert all(role.suspended == set() for role in run.servers.roles.values())
        async with busy(run.servers.roles["env"], R1, 1000):
            begun_s = run.servers.clock.monotonic()
            late = await run.not_taken(stop=True, deadline=run.servers.deadline(4))
            assert late.blockers == ("r1",)
            assert run.servers.clock.monotonic() - begun_s < 10

    play(tmp_path, story)


def test_a_server_that_hangs_keeps_a_last_checkpoint_no_longer_than_told(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        run.servers.network.faults.append(Fault("delay_request", "tools", "/resume", delay_s=1000.0, times=9))
        begun_s = run.servers.clock.monotonic()
        taken = await run.checkpointer.take(stop=True, deadline=run.servers.deadline(4))
        assert isinstance(taken, CheckpointTaken)
        assert "when its lease ends" in taken.warnings[0]
        assert run.servers.clock.monotonic() - begun_s <= 4 + LAST_RESUME_S

    play(tmp_path, story)


def test_a_server_that_cannot_be_resumed_is_told_of_and_the_checkpoint_stands(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        run.servers.network.faults.append(Fault("refused", "tools", "/resume", times=4))
        taken = await run.checkpointer.take()
        assert isinstance(taken, CheckpointTaken)
        assert "resources tools" in taken.warnings[0]
        assert run.servers.closed() == ["tools"]
        assert (await run.taken()).warnings == ()

    play(tmp_path, story)


def test_what_stayed_closed_is_opened_before_anything_else_however_often_it_has_to_be_asked(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        run.servers.network.faults.append(Fault("lost_request", "tools", "/resume", times=100))
        first = await run.checkpointer.take()
        assert isinstance(first, CheckpointTaken)
        for _ in range(3):
            missed = await run.checkpointer.take()
            assert isinstance(missed, CheckpointNotTaken)
            assert missed.checkpoint_id is None
            assert first.checkpoint_id in missed.reason
        run.servers.network.faults.clear()
        assert not run.checkpointer.all_resumed
        assert await run.checkpointer.resume_again()
        assert run.servers.closed() == []
        await run.taken()

    play(tmp_path, story)
