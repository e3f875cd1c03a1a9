"""A checkpoint of a running collection: real participants, real files, virtual time, and everything that goes wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from gymckpt import coordination, crashpoints
from gymckpt.collection import events
from gymckpt.collection.candidates import find_candidates, with_salvaged
from gymckpt.collection.events import FROM_INPUT, Source
from gymckpt.collection.recovery_procedure import RecoverySettings, recover
from gymckpt.identity import EpisodeId
from tests.collection.checkpointed import R1, R2, R3, Run, play, restarted
from tests.simulation.counters import TOKEN


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


def test_leases_are_renewed_while_publishing_is_slow(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        taken = await run.taken()
        assert taken.pause_s >= 500
        assert all("lease_expired" not in p.counters for p in run.servers.participants.values())
        await run.newest()

    play(tmp_path, story, grace_s=2.0, slow_publish_s=500.0)


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
        found, notes = await with_salvaged(run.directory, run.host, servers.fs, servers.offload, servers.clock, whole)
        assert [c.made_of for c in found] == [newest.checkpoint_id, None]
        assert found[0].continued == (R2,)
        assert [note.split(": ")[1] for note in notes] == ["1 episodes continue, 1 start over"]
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
