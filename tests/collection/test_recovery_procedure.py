"""Recovery onto real participants: what a crash anywhere leaves behind is put right by the next one."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gymckpt import coordination, crashpoints
from gymckpt.collection import events
from gymckpt.collection.events import FROM_INPUT, Source
from gymckpt.collection.recovery import Candidate, Restore, Start, Step
from gymckpt.collection.recovery_procedure import Recovered, RecoverySettings, recover
from gymckpt.crashpoints import CrashPointError
from gymckpt.errors import NotAsAsked, ServerError
from gymckpt.identity import EpisodeId
from tests.collection.hosts import MemoryHost
from tests.simulation.clock import run_virtual
from tests.simulation.counters import TOKEN, Counters
from tests.simulation.transport import Fault

R1, R2, R3 = EpisodeId("r1"), EpisodeId("r2"), EpisodeId("r3")


class Run:
    """A run of three rollouts on four servers; r1 and r2 are in the checkpoints, r3 came later."""

    def __init__(self, directory: Path) -> None:
        self.servers = Counters(directory).start()
        self.host = MemoryHost()
        self.checkpoints: list[Candidate] = []

    async def dispatch(self, *episodes: EpisodeId) -> None:
        for episode in episodes:
            await self.host.record(events.Dispatched(episode, "env"))
            await self.servers.run_episode(episode)

    async def checkpoint(self, *scope: EpisodeId) -> Candidate:
        servers = self.servers
        deployment = await coordination.discover(servers.servers, servers.network, TOKEN, servers.deadline())
        name = await self.host.begin_checkpoint()
        assert (await coordination.prepare(deployment, servers.network, TOKEN, name, servers.deadline())).ready
        path = servers.directory / name
        path.mkdir()
        answers = await coordination.commit(
            deployment, servers.network, TOKEN, name, servers.deadline(), checkpoint_dir=path, episodes=scope
        )
        answers.require()
        await coordination.resume(deployment, servers.network, TOKEN, name, servers.deadline())
        await self.host.record(events.CheckpointPublished(name))
        self.checkpoints.insert(0, Candidate(name, path, scope, deployment.names))
        return self.checkpoints[0]

    async def recover(self, *, start_over: bool = False, steps: list[Step] | None = None) -> Recovered:
        servers = self.servers
        deployment = await coordination.discover(servers.servers, servers.network, TOKEN, servers.deadline())
        return await recover(
            deployment,
            servers.network,
            TOKEN,
            self.host,
            self.checkpoints,
            RecoverySettings(start_over=start_over),
            servers.clock,
            fs=servers.fs,
            offload=servers.offload,
            on_step=lambda number, step: steps.append(step) if steps is not None else None,
        )

    async def restart(self, *names: str) -> None:
        chosen = names or ("env", "agent", "policy", "tools")
        await self.servers.stop(chosen)
        self.servers.start(chosen)


def play(directory: Path, story: Callable[[Run], Awaitable[None]]) -> None:
    async def main() -> None:
        run = Run(directory)
        await run.dispatch(R1, R2)
        await run.checkpoint(R1, R2)
        await run.dispatch(R3)
        await story(run)
        await run.servers.stop()

    run_virtual(main())


def damage(candidate: Candidate) -> None:
    [index] = (Path(candidate.directory) / "gym" / "agent" / "agent").glob("episodes-*")
    index.write_bytes(b"not what was written")


def restored_in(run: Run) -> set[EpisodeId]:
    return {episode for role in run.servers.roles.values() for episode in role.restored}


def test_after_the_death_of_everything_each_rollout_goes_on_from_its_boundary_or_the_input(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        await run.restart()
        recovered = await run.recover()
        name = run.checkpoints[0].checkpoint_id
        assert {key: (start.episode.attempt, start.source) for key, start in recovered.starts.items()} == {
            "r1": (1, Source(name, 0)),
            "r2": (1, Source(name, 0)),
            "r3": (1, FROM_INPUT),
        }
        assert restored_in(run) == {R1.next, R2.next}
        assert run.servers.closed() == []
        assert run.host.history().open_ids == frozenset()

    play(tmp_path, story)


def test_when_only_the_collector_died_the_servers_are_emptied_and_restored(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        recovered = await run.recover()
        assert recovered.checkpoint_id == run.checkpoints[0].checkpoint_id
        assert run.servers.live() == {"r1-a1", "r2-a1"}
        for role in run.servers.roles.values():
            assert role.marks.refuses(R3)
            assert role.marks.refuses(R1)
            assert not role.marks.refuses(R1.next)

    play(tmp_path, story)


def test_when_one_server_died_all_go_back_to_the_same_instant(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        await run.servers.run_episode(R1, bumps=5)
        await run.restart("tools")
        await run.recover()
        assert all(role.restored[R1.next] == [0, 1] for role in run.servers.roles.values())

    play(tmp_path, story)


@pytest.mark.parametrize(
    "point",
    ["restore.intended", "restore.retired", "restore.sent", "restore.done", "restore.resumed"],
)
@pytest.mark.parametrize("servers_die_too", [False, True])
def test_killed_anywhere_in_it_and_again_in_the_next_one_the_third_one_finishes(
    tmp_path: Path, point: str, servers_die_too: bool
) -> None:
    async def story(run: Run) -> None:
        for death in (1, 2):
            crashpoints.arm(f"collector.{point}:error")
            with pytest.raises(CrashPointError):
                await run.recover()
            assert len(run.host.said(events.RestoreIntended)) == death
            if servers_die_too:
                await run.restart()
        crashpoints.arm(None)
        recovered = await run.recover()
        assert recovered.starts["r1"].episode == EpisodeId("r1", 3)
        assert recovered.starts["r1"].source == Source(run.checkpoints[0].checkpoint_id, 0)
        assert restored_in(run) == {EpisodeId("r1", 3), EpisodeId("r2", 3)}
        assert run.servers.closed() == []
        installs = [i for event in run.host.said(events.RestoreIntended) for i in event.installs]
        assert len({(i.rollout_id, i.installed) for i in installs}) == len(installs)

    try:
        play(tmp_path, story)
    finally:
        crashpoints.arm(None)


def test_a_damaged_checkpoint_activates_nothing_and_the_one_before_is_used_with_new_numbers(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        await run.servers.run_episode(R1, bumps=3)
        damage(await run.checkpoint(R1, R2, R3))
        await run.restart()
        recovered = await run.recover()
        newest, older = (checkpoint.checkpoint_id for checkpoint in run.checkpoints)
        assert recovered.checkpoint_id == older
        assert restored_in(run) == {EpisodeId("r1", 2), EpisodeId("r2", 2)}
        assert recovered.starts["r3"] == Start(EpisodeId("r3", 2), FROM_INPUT)
        assert newest in recovered.notes[0]
        assert older in recovered.notes[0]
        assert len(run.host.said(events.RestoreFailed)) == 1

    play(tmp_path, story)


def test_with_nothing_whole_to_stand_on_all_start_over_and_it_says_so(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        damage(run.checkpoints[0])
        await run.restart()
        recovered = await run.recover()
        assert recovered.checkpoint_id is None
        assert {start.source for start in recovered.starts.values()} == {FROM_INPUT}
        assert "starting over from the input" in recovered.notes[0]
        assert restored_in(run) == set()

    play(tmp_path, story)


def test_a_server_that_holds_strangers_is_named_and_nothing_is_restored(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        run.servers.roles["tools"].start(EpisodeId("stranger"))
        with pytest.raises(ServerError, match="resources tools") as refusal:
            await run.recover()
        assert refusal.value.exit_code == 5
        assert "--start-over" in str(refusal.value.hint)
        assert restored_in(run) == set()
        assert run.servers.closed() == []
        recovered = await run.recover(start_over=True)
        assert recovered.starts["r1"].episode == EpisodeId("r1", 2)
        assert run.servers.live() == {"stranger"}

    play(tmp_path, story)


def test_a_checkpoint_that_the_dead_collector_left_open_is_aborted_first(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        servers = run.servers
        deployment = await coordination.discover(servers.servers, servers.network, TOKEN, servers.deadline())
        left = await run.host.begin_checkpoint()
        assert (await coordination.prepare(deployment, servers.network, TOKEN, left, servers.deadline())).ready
        await run.recover()
        assert servers.closed() == []
        late = await coordination.prepare(deployment, servers.network, TOKEN, left, servers.deadline())
        assert not late.ready
        assert servers.closed() == []

    play(tmp_path, story)


def test_a_server_that_cannot_see_the_checkpoints_is_named_and_nothing_starts_over(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        await run.servers.stop(["agent"])
        run.servers.directory = tmp_path / "elsewhere"
        run.servers.start(["agent"])
        with pytest.raises(ServerError, match="agent agent cannot see") as blind:
            await run.recover()
        assert blind.value.exit_code == 5
        assert run.host.said(events.RestoreIntended) == []
        assert run.servers.network.sent("retire") == []

    play(tmp_path, story)


def test_two_ids_of_ours_that_hold_different_servers_are_both_aborted(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        servers = run.servers
        deployment = await coordination.discover(servers.servers, servers.network, TOKEN, servers.deadline())
        for holder in deployment.participants[:2]:
            left = await run.host.begin_checkpoint()
            one = deployment.only({holder.name})
            assert (await coordination.prepare(one, servers.network, TOKEN, left, servers.deadline())).ready
        await run.recover()
        assert servers.closed() == []

    play(tmp_path, story)


def test_a_foreign_checkpoint_is_left_alone(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        servers = run.servers
        deployment = await coordination.discover(servers.servers, servers.network, TOKEN, servers.deadline())
        assert (await coordination.prepare(deployment, servers.network, TOKEN, "theirs", servers.deadline())).ready
        with pytest.raises(ServerError, match="theirs"):
            await run.recover()
        assert servers.closed() == ["env", "agent", "policy", "tools"]
        assert servers.network.sent("retire") == []

    play(tmp_path, story)


def test_lost_replies_on_the_way_change_nothing(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        for operation in ("retire", "restore", "resume"):
            run.servers.network.faults.append(Fault("lost_reply", "agent", f"/{operation}", times=2))
        await run.recover()
        assert restored_in(run) == {R1.next, R2.next}
        assert run.servers.network.sent("restore").count("agent") == 3

    play(tmp_path, story)


def test_a_collector_that_lost_its_lock_touches_no_server(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        run.host.lock_lost = True
        before = len(run.servers.network.exchanges)
        with pytest.raises(NotAsAsked):
            await run.recover()
        assert {e.method for e in run.servers.network.exchanges[before:]} == {"GET"}

    play(tmp_path, story)


def test_the_restored_attempts_replace_what_a_half_done_restore_left_unclaimed(tmp_path: Path) -> None:
    async def story(run: Run) -> None:
        await run.restart()
        await run.recover()
        steps: list[Step] = []
        recovered = await run.recover(steps=steps)
        [restore] = [step for step in steps if isinstance(step, Restore)]
        assert restore.named == (R1.next, R2.next)
        assert restored_in(run) == {EpisodeId("r1", 2), EpisodeId("r2", 2)}
        assert recovered.starts["r3"].source == FROM_INPUT

    play(tmp_path, story)
