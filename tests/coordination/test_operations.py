"""Each operation across real participants, over a network that loses, delays and refuses."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fastapi import FastAPI, Response

from gymckpt import coordination
from gymckpt.coordination import Deployment
from gymckpt.errors import (
    CheckpointFailed,
    DeadlinePassed,
    InvalidCheckpointState,
    InvalidPhase,
    NotSent,
    RestartInScope,
    ServerError,
    StaleCheckpoint,
)
from gymckpt.identity import EpisodeId
from tests.participant.roles import busy
from tests.simulation.clock import run_virtual
from tests.simulation.counters import TOKEN, Counters
from tests.simulation.transport import Fault

E1, E2 = EpisodeId("r1"), EpisodeId("r2", 4)


def on_servers(tmp_path: Path, story: Callable[[Counters, Deployment], Awaitable[None]]) -> None:
    """Play `story` on a fresh deployment, in virtual time."""

    async def main() -> None:
        servers = Counters(tmp_path).start()
        deployment = await coordination.discover(servers.servers, servers.network, TOKEN, servers.deadline())
        servers.network.exchanges.clear()
        await story(servers, deployment)
        await servers.stop()

    run_virtual(main())


async def prepared(servers: Counters, deployment: Deployment, name: str = "ckpt-1") -> coordination.Prepared:
    return await coordination.prepare(deployment, servers.network, TOKEN, name, servers.deadline())


async def committed(servers: Counters, deployment: Deployment, scope: list[EpisodeId], name: str = "ckpt-1") -> Path:
    assert (await prepared(servers, deployment, name)).ready
    directory = servers.directory / name
    directory.mkdir()
    answers = await coordination.commit(
        deployment, servers.network, TOKEN, name, servers.deadline(), checkpoint_dir=directory, episodes=scope
    )
    answers.require()
    return directory


async def resumed(servers: Counters, deployment: Deployment, name: str = "ckpt-1") -> None:
    answers = await coordination.resume(deployment, servers.network, TOKEN, name, servers.deadline())
    assert answers.complete


def test_prepare_goes_from_the_callers_down_and_resume_the_other_way(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        assert (await prepared(servers, deployment)).ready
        assert servers.network.sent("prepare") == ["env", "policy", "agent", "tools"]
        assert servers.closed() == ["env", "agent", "policy", "tools"]
        await resumed(servers, deployment)
        assert servers.network.sent("resume") == ["tools", "agent", "policy", "env"]
        assert servers.closed() == []

    on_servers(tmp_path, story)


def test_prepare_stops_at_the_first_stage_that_is_not_ready_and_names_the_blockers(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        servers.roles["policy"].start(E1)
        async with busy(servers.roles["policy"], E1, 1000):
            late = await prepared(servers, deployment)
            assert not late.ready
            assert late.blockers == ("r1",)
            assert "model policy" in late.reason
            assert {p.instance for p in late.unreached} == {"agent", "tools"}
            assert servers.network.sent("prepare") == ["env", "policy"]
            await resumed(servers, deployment)
            assert servers.closed() == []

    on_servers(tmp_path, story)


def test_a_missed_prepare_can_be_asked_again_with_the_same_id(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        servers.roles["env"].start(E1)
        async with busy(servers.roles["env"], E1, 45):
            assert not (await prepared(servers, deployment)).ready
            assert (await prepared(servers, deployment)).ready

    on_servers(tmp_path, story)


def test_restarts_are_collected_from_every_participant_with_who_reported_them(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        servers.roles["env"].start(E1)
        servers.roles["tools"].start(E1, restart=True)
        servers.roles["agent"].start(E2, restart=True)
        assert (await prepared(servers, deployment)).restarts == {E1: "tools", E2: "agent"}

    on_servers(tmp_path, story)


def test_a_reply_may_come_five_seconds_after_the_deadline_and_not_later(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        servers.network.faults.append(Fault("delay_reply", "env", "/prepare", delay_s=34))
        assert "env" in servers.roles
        first = await coordination.prepare(
            deployment.only({("environment", "env")}), servers.network, TOKEN, "ckpt-1", servers.deadline()
        )
        assert first.ready
        servers.network.faults.append(Fault("delay_reply", "env", "/prepare", delay_s=36))
        second = await prepared(servers, deployment)
        assert not second.ready
        assert [p.instance for p in second.not_ready] == ["env"]

    on_servers(tmp_path, story)


def test_calls_whose_connection_broke_are_repeated_and_change_nothing_twice(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        await servers.run_episode(E1)
        for operation in ("prepare", "commit", "renew", "resume", "retire", "forget"):
            servers.network.faults.append(Fault("lost_reply", "agent", f"/{operation}"))
            servers.network.faults.append(Fault("lost_request", "tools", f"/{operation}"))
        await committed(servers, deployment, [E1])
        (await coordination.renew(deployment, servers.network, TOKEN, "ckpt-1", servers.deadline())).require()
        await resumed(servers, deployment)
        limit = servers.deadline()
        retired = await coordination.retire(deployment, servers.network, TOKEN, "ckpt-2", limit, episodes=[E1])
        forgotten = await coordination.forget(deployment, servers.network, TOKEN, "ckpt-2", limit, rollout_ids=["r1"])
        assert retired.complete
        assert forgotten.complete
        assert servers.network.sent("commit").count("agent") == 2
        assert servers.roles["agent"].exports == 1
        assert not servers.live()

    on_servers(tmp_path, story)


def test_a_connection_that_breaks_every_time_is_given_up_within_the_deadline(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        servers.network.faults.append(Fault("lost_request", "env", "/renew", times=100))
        begun_s = servers.clock.monotonic()
        answers = await coordination.renew(deployment, servers.network, TOKEN, "ckpt-1", servers.deadline(1.0))
        assert servers.clock.monotonic() - begun_s <= 1.0
        assert isinstance(answers.failures[0].error, ServerError)
        assert "environment env" in answers.failures[0].error.detail

    on_servers(tmp_path, story)


def test_refusals_come_back_as_their_own_errors_with_the_instance_in_them(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        answers = await coordination.renew(deployment, servers.network, TOKEN, "ckpt-1", servers.deadline())
        assert all(isinstance(failure.error, InvalidPhase) for failure in answers.failures)
        with pytest.raises(InvalidPhase, match=r"renew on environment env.*renew on resources tools"):
            answers.require()
        servers.roles["tools"].start(E1, restart=True)
        assert (await prepared(servers, deployment)).ready
        (servers.directory / "ckpt-1").mkdir()
        refused = await coordination.commit(
            deployment,
            servers.network,
            TOKEN,
            "ckpt-1",
            servers.deadline(),
            checkpoint_dir=servers.directory / "ckpt-1",
            episodes=[E1],
        )
        assert [type(failure.error) for failure in refused.failures] == [RestartInScope]
        await resumed(servers, deployment)
        late = await coordination.prepare(deployment, servers.network, TOKEN, "ckpt-1", servers.deadline())
        assert isinstance(late.failures[0].error, StaleCheckpoint)
        assert servers.closed() == []

    on_servers(tmp_path, story)


def test_a_server_that_hangs_keeps_no_other_closed(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        assert (await prepared(servers, deployment)).ready
        servers.network.faults.append(Fault("delay_request", "tools", "/resume", delay_s=1000.0))
        deadline = servers.deadline(2)
        answers = await coordination.resume(deployment, servers.network, TOKEN, "ckpt-1", deadline)
        assert [failure.participant.instance for failure in answers.failures] == ["tools"]
        assert servers.closed() == ["tools"]

    on_servers(tmp_path, story)


def test_a_resume_goes_past_a_dead_server_and_reports_it(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        assert (await prepared(servers, deployment)).ready
        await servers.stop(["agent"])
        answers = await coordination.resume(deployment, servers.network, TOKEN, "ckpt-1", servers.deadline())
        assert [failure.participant.instance for failure in answers.failures] == ["agent"]
        assert isinstance(answers.failures[0].error, NotSent)
        assert [name for name in servers.closed() if name != "agent"] == []

    on_servers(tmp_path, story)


def test_retire_stops_callers_first_and_goes_no_further_past_a_failure(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        await servers.run_episode(E1)
        await servers.stop(["agent"])
        answers = await coordination.retire(
            deployment, servers.network, TOKEN, "ckpt-1", servers.deadline(), episodes=[E1]
        )
        assert servers.network.sent("retire") == ["env"]
        assert [failure.participant.instance for failure in answers.failures] == ["agent"]
        assert {p.instance for p in answers.unreached} == {"policy", "tools"}
        assert not answers.complete
        error = coordination.failed(answers, "cannot retire")
        assert error is not None
        assert "model policy" in error.detail

    on_servers(tmp_path, story)


def test_a_restore_installs_everywhere_as_the_attempt_after_the_named_one(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        await servers.run_episode(E1)
        directory = await committed(servers, deployment, [E1])
        await servers.stop()
        servers.start()
        deployment = await coordination.discover(servers.servers, servers.network, TOKEN, servers.deadline())
        replies = await coordination.restore(
            deployment,
            servers.network,
            TOKEN,
            "ckpt-2",
            servers.deadline(),
            checkpoint_dir=directory,
            episodes=[EpisodeId("r1", 6)],
        )
        assert all(reply.restored == ["r1-a7"] for reply in replies.values())
        assert servers.closed() == ["env", "agent", "policy", "tools"]
        await resumed(servers, deployment, "ckpt-2")
        assert all(role.restored == {EpisodeId("r1", 7): [0, 1]} for role in servers.roles.values())

    on_servers(tmp_path, story)


def test_a_restore_that_fails_anywhere_leaves_every_server_open_and_empty(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        await servers.run_episode(E1)
        directory = await committed(servers, deployment, [E1])
        [segment] = (directory / "gym" / "resources" / "tools").glob("segment-*")
        segment.write_bytes(segment.read_bytes()[:-1])
        await servers.stop()
        servers.start()
        deployment = await coordination.discover(servers.servers, servers.network, TOKEN, servers.deadline())
        with pytest.raises(InvalidCheckpointState, match="resources tools"):
            await coordination.restore(
                deployment,
                servers.network,
                TOKEN,
                "ckpt-2",
                servers.deadline(),
                checkpoint_dir=directory,
                episodes=[E1],
            )
        assert servers.closed() == []
        assert servers.live() == set()
        assert all(role.marks.refuses(E1.next) for role in servers.roles.values())

    on_servers(tmp_path, story)


def test_a_server_that_is_not_empty_refuses_a_restore_and_says_what_it_holds(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        await servers.run_episode(E1)
        directory = await committed(servers, deployment, [E1])
        await resumed(servers, deployment)
        with pytest.raises(CheckpointFailed, match="environment env"):
            await coordination.restore(
                deployment,
                servers.network,
                TOKEN,
                "ckpt-2",
                servers.deadline(),
                checkpoint_dir=directory,
                episodes=[E1],
            )

    on_servers(tmp_path, story)


def test_an_answer_that_is_no_message_is_an_error_and_not_believed(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        odd = FastAPI()

        async def answer() -> Response:
            return Response('{"phase": "certainly", "report": {}}', media_type="application/json")

        odd.add_api_route("/ng-control/v1/checkpoint/prepare", answer, methods=["POST"])
        servers.network.serve(servers.ref("env"), odd)
        result = await prepared(servers, deployment)
        assert not result.ready
        assert "PrepareReply" in result.reason

    on_servers(tmp_path, story)


def test_a_deadline_that_has_passed_is_a_miss_and_not_a_breakdown(tmp_path: Path) -> None:
    async def story(servers: Counters, deployment: Deployment) -> None:
        limit = servers.deadline(1.0)
        await asyncio.sleep(2.0)
        late = await coordination.prepare(deployment, servers.network, TOKEN, "ckpt-1", limit)
        assert not late.ready
        assert not late.failures
        assert [p.instance for p in late.not_ready] == ["env"]
        await asyncio.sleep(10)
        with pytest.raises(DeadlinePassed):
            (await coordination.statuses(deployment, servers.network, TOKEN, limit)).require()

    on_servers(tmp_path, story)
