"""A checkpoint of a running collection: real participants, real files, virtual time, and everything that goes wrong."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import pytest

from gymckpt import coordination, crashpoints
from gymckpt.collection import events
from gymckpt.collection.candidates import find_candidates, with_salvaged
from gymckpt.collection.checkpointing import (
    LAST_RESUME_S,
    Checkpointer,
    CheckpointNotTaken,
    CheckpointSettings,
    CheckpointTaken,
)
from gymckpt.collection.events import FROM_INPUT, Source
from gymckpt.collection.recovery_procedure import RecoverySettings, recover
from gymckpt.errors import NotAsAsked
from gymckpt.identity import EpisodeId
from gymckpt.storage.checkpoints import CheckpointDirectory, Collection, PublishedCheckpoint
from tests.collection.hosts import MemoryHost
from tests.participant.roles import busy
from tests.simulation.clock import run_virtual
from tests.simulation.counters import TOKEN, Counters
from tests.simulation.transport import Fault

R1, R2, R3 = EpisodeId("r1"), EpisodeId("r2"), EpisodeId("r3")


@dataclass
class Run:
    servers: Counters
    host: MemoryHost
    directory: CheckpointDirectory
    checkpointer: Checkpointer

    @classmethod
    async def begin(cls, path: Path, *, grace_s: float = 60.0, slow_publish_s: float = 0.0) -> "Run":
        servers = Counters(path, grace_s=grace_s).start()
        host = MemoryHost()
        root = path / "checkpoints"
        directory = _SlowDirectory(servers, root, slow_publish_s)
        deployment = await coordination.discover(servers.servers, servers.network, TOKEN, servers.deadline())
        checkpointer = Checkpointer(
            deployment,
            servers.network,
            TOKEN,
            directory,
            host,
            CheckpointSettings(commit_timeout_s=40.0, control_timeout_s=20.0),
            servers.clock,
            fs=servers.fs,
            offload=servers.offload,
        )
        return cls(servers, host, directory, checkpointer)

    async def dispatch(self, *episodes: EpisodeId, owner: str = "env") -> None:
        for episode in episodes:
            await self.host.record(events.Dispatched(episode, owner))
            self.host.flying[episode] = owner
            if owner == "env":
                await self.servers.run_episode(episode)

    async def taken(self, **how: Any) -> CheckpointTaken:
        result = await self.checkpointer.take(**how)
        assert isinstance(result, CheckpointTaken), result
        self.check_open()
        return result

    async def not_taken(self, **how: Any) -> CheckpointNotTaken:
        result = await self.checkpointer.take(**how)
        assert isinstance(result, CheckpointNotTaken), result
        self.check_open()
        return result

    def check_open(self) -> None:
        assert self.servers.closed() == []
        assert {p.phase for p in self.servers.participants.values()} == {"idle"}

    async def newest(self) -> PublishedCheckpoint:
        checkpoint, problems = await self.directory.newest_valid(self.host.run_id)
        assert problems == []
        assert checkpoint is not None
        return checkpoint

    def unpublished(self) -> list[str]:
        root = Path(self.servers.directory) / "checkpoints"
        if not root.exists():
            return []
        return sorted(path.name for path in root.iterdir() if not (path / "CHECKPOINT.json").exists())


class _SlowDirectory(CheckpointDirectory):
    """Publishing takes its time, as on a busy disk."""

    def __init__(self, servers: Counters, root: PurePath, slow_s: float) -> None:
        super().__init__(servers.fs, servers.offload, root)
        self._slow_s = slow_s

    async def publish(self, checkpoint_id: str, collection: Collection, *, expected: Any = None) -> PublishedCheckpoint:
        await asyncio.sleep(self._slow_s)
        return await super().publish(checkpoint_id, collection, expected=expected)


def play(path: Path, story: Callable[[Run], Awaitable[None]], **how: Any) -> None:
    async def main() -> None:
        run = await Run.begin(path, **how)
        await run.dispatch(R1, R2)
        try:
            await story(run)
        finally:
            await run.servers.stop()

    try:
        run_virtual(main())
    finally:
        crashpoints.arm(None)


def restarted(checkpoint: PublishedCheckpoint) -> dict[EpisodeId, str]:
    return {restart.episode: restart.reason for restart in checkpoint.collection.restarted}


def test_what_runs_is_continued_published_and_journalled_and_the_servers_go_on(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        taken = await run.taken()
        newest = await run.newest()
        assert newest.checkpoint_id == taken.checkpoint_id
        assert sorted(newest.collection.continued) == [R1, R2]
        assert (taken.episodes, taken.restarts, taken.warnings) == (2, 0, ())
        assert taken.size_bytes > 0
        assert taken.pause_s >= taken.commit_s >= 0
        [published] = run.host.said(events.CheckpointPublished)
        assert (published.checkpoint_id, published.episodes) == (taken.checkpoint_id, 2)
        assert run.host.history().open_ids == frozenset()
        assert await run.servers.roles["tools"].bump(R1) == 3

    play(tmp_path, story)


def test_the_id_is_durable_before_any_server_hears_it_and_never_used_again(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        crashpoints.arm("collector.prepare.begun:error")
        failed = await run.not_taken()
        assert run.servers.network.sent("prepare") == []
        taken = await run.taken()
        begun = [event.checkpoint_id for event in run.host.said(events.CheckpointBegun)]
        assert begun == [failed.checkpoint_id, taken.checkpoint_id]
        assert len(set(begun)) == 2

    play(tmp_path, story)


def test_restored_and_not_yet_sent_episodes_are_in_scope_too(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        await run.servers.run_episode(R3)
        run.host.unsent[R3] = "env"
        await run.taken()
        assert sorted((await run.newest()).collection.continued) == [R1, R2, R3]

    play(tmp_path, story)


def test_restarts_are_left_out_of_the_scope_and_listed_with_the_reason(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        run.servers.roles["tools"].start(R3, restart=True)
        await run.servers.run_episode(R3, on=["env"])
        run.host.flying[R3] = "env"
        await run.dispatch(EpisodeId("r4"), owner="judge")
        taken = await run.taken()
        assert taken.restarts == 2
        assert restarted(await run.newest()) == {
            R3: "cannot_capture:tools",
            EpisodeId("r4"): "cannot_capture:judge",
        }
        [scope] = {str(e.body["episode_ids"]) for e in run.servers.network.exchanges if e.path.endswith("/commit")}
        assert "r3" not in scope

    play(tmp_path, story)


def test_an_episode_that_ended_at_the_cut_is_neither_continued_nor_restarted_once_its_outcome_is_durable(
    tmp_path: Path,
) -> None:
    async def story(run: Run) -> None:
        run.servers.roles["env"].end(R1)
        run.host.replies[R1] = 3.0
        taken = await run.taken()
        newest = await run.newest()
        assert newest.collection.continued == [R2]
        assert restarted(newest) == {}
        assert taken.pause_s >= 3.0

    play(tmp_path, story)


@pytest.mark.parametrize("reply_s", [None, 1000.0])
def test_an_episode_that_ended_without_a_reply_is_restarted_never_restored(
    tmp_path: Path, reply_s: float | None
) -> None:
    async def story(run: Run) -> None:
        run.servers.roles["env"].end(R1)
        run.host.replies[R1] = reply_s
        taken = await run.taken()
        assert restarted(await run.newest()) == {R1: "no_reply"}
        assert taken.pause_s <= 25.0

    play(tmp_path, story)


def test_an_episode_whose_tools_lost_its_session_is_restarted(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        run.servers.roles["tools"].end(R1)
        await run.servers.run_episode(R3, bumps=0)
        run.host.flying[R3] = "env"
        await run.taken()
        newest = await run.newest()
        assert restarted(newest) == {R1: "missing_in:tools", R3: "no_boundary"}
        assert newest.collection.continued == [R2]

    play(tmp_path, story)


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


def test_leases_are_renewed_while_publishing_is_slow(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        taken = await run.taken()
        assert taken.pause_s >= 500
        assert all("lease_expired" not in p.counters for p in run.servers.participants.values())
        await run.newest()

    play(tmp_path, story, grace_s=2.0, slow_publish_s=500.0)


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


def test_with_no_participant_nothing_is_begun(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        run.checkpointer.deployment = replace(run.checkpointer.deployment, participants=())
        assert (await run.not_taken()).checkpoint_id is None
        assert run.host.said(events.CheckpointBegun) == []

    play(tmp_path, story)


def test_the_second_checkpoint_is_incremental_and_both_bring_everything_back(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        await run.taken()
        await run.servers.run_episode(R1, bumps=3)
        await run.taken()
        await run.servers.stop()
        servers = run.servers.start()
        deployment = await coordination.discover(servers.servers, servers.network, TOKEN, servers.deadline())
        found, problems = await find_candidates(run.directory, run.host.run_id)
        assert (len(found), problems) == (2, [])
        recovered = await recover(
            deployment,
            servers.network,
            TOKEN,
            run.host,
            found,
            RecoverySettings(),
            servers.clock,
            fs=servers.fs,
            offload=servers.offload,
        )
        assert recovered.starts["r1"].source == Source(found[0].checkpoint_id, 0)
        for role in servers.roles.values():
            assert role.restored == {R1.next: [0, 1, 2, 3, 4], R2.next: [0, 1]}
        run.check_open()

    play(tmp_path, story)


def damage_what_is_new(directory: Path) -> None:
    """Zeros in place of the segment that this checkpoint added; the one it shares with an older checkpoint stays."""
    by_links = {path.stat().st_nlink: path for path in directory.glob("segment-*")}
    assert sorted(by_links) == [1, 2]
    by_links[1].write_bytes(bytes(by_links[1].stat().st_size))


def test_what_can_still_be_read_of_a_damaged_checkpoint_is_salvaged_at_the_users_wish(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        await run.taken()
        await run.servers.run_episode(R1, bumps=3)
        await run.taken()
        newest = await run.newest()
        damage_what_is_new(Path(newest.directory("agent", "agent")))
        servers = run.servers
        whole, problems = await find_candidates(run.directory, run.host.run_id)
        assert (len(whole), len(problems)) == (1, 1)
        found = await with_salvaged(run.directory, run.host, servers.fs, servers.offload, servers.clock, whole)
        assert [c.made_of for c in found] == [newest.checkpoint_id, None]
        assert found[0].continued == (R2,)
        await servers.stop()
        servers.start()
        deployment = await coordination.discover(servers.servers, servers.network, TOKEN, servers.deadline())
        recovered = await recover(
            deployment,
            servers.network,
            TOKEN,
            run.host,
            found,
            RecoverySettings(),
            servers.clock,
            fs=servers.fs,
            offload=servers.offload,
        )
        assert recovered.starts["r2"].source == Source(found[0].checkpoint_id, 0)
        assert recovered.starts["r1"].source == FROM_INPUT

    play(tmp_path, story)
