"""Who takes part, and who is who."""

import asyncio
import logging
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Response
from pydantic import SecretStr

from gymckpt.coordination import PathMap, PathMapping, discover, probe, statuses
from gymckpt.errors import ServerError, Unauthorized, UsageError
from gymckpt.ports import Deadline, Reply, ServerRef
from tests.simulation.clock import VirtualClock, run_virtual
from tests.simulation.counters import KINDS, TOKEN, Counters
from tests.simulation.transport import Fault, MemoryNetwork


def test_a_server_that_answers_404_is_no_participant(tmp_path: Path) -> None:
    async def main() -> None:
        servers = Counters(tmp_path).start()
        deployment = await discover(servers.servers, servers.network, TOKEN, servers.deadline())
        assert {p.name for p in deployment.participants} == {(kind, name) for name, kind in KINDS.items()}
        assert [server.instance for server in deployment.plain] == ["judge"]
        assert all(p.boot_id == servers.participants[p.instance].boot_id for p in deployment.participants)

    run_virtual(main())


def test_two_broken_connections_do_not_fail_a_discovery_but_a_dead_server_does(tmp_path: Path) -> None:
    async def main() -> None:
        servers = Counters(tmp_path).start()
        servers.network.faults.append(Fault("lost_reply", "agent", times=2))
        await discover(servers.servers, servers.network, TOKEN, servers.deadline())
        await servers.stop(["agent"])
        with pytest.raises(ServerError, match="agent"):
            await discover(servers.servers, servers.network, TOKEN, servers.deadline())

    run_virtual(main())


def test_a_wrong_token_and_a_server_in_trouble_fail_the_discovery(tmp_path: Path) -> None:
    async def main() -> None:
        servers = Counters(tmp_path).start()
        with pytest.raises(Unauthorized, match="env"):
            await discover(servers.servers, servers.network, SecretStr("wrong"), servers.deadline())
        with pytest.raises(Unauthorized):
            await discover(servers.servers, servers.network, None, servers.deadline())
        ill = FastAPI()

        async def trouble() -> Response:
            return Response("<html>", status_code=500)

        ill.add_api_route("/ng-control/v1/checkpoint/status", trouble)
        servers.network.serve(ServerRef("ill", "memory://ill"), ill)
        with pytest.raises(ServerError, match=r"ill.*500"):
            await discover([ServerRef("ill", "memory://ill")], servers.network, TOKEN, servers.deadline())
        assert servers.network.sent("status").count("ill") == 3

    run_virtual(main())


def test_kind_and_instance_are_unique_and_a_trainer_insists_on_a_model(tmp_path: Path) -> None:
    async def main() -> None:
        servers = Counters(tmp_path).start()
        twin = [servers.ref("env"), ServerRef("other", "memory://env")]
        with pytest.raises(ServerError, match="environment env"):
            await discover(twin, servers.network, TOKEN, servers.deadline())
        with pytest.raises(UsageError, match="env"):
            await discover([servers.ref("env")] * 2, servers.network, TOKEN, servers.deadline())
        without = [servers.ref("env"), servers.ref("agent")]
        with pytest.raises(ServerError, match="model"):
            await discover(without, servers.network, TOKEN, servers.deadline(), require_model=True)
        assert len((await discover(without, servers.network, TOKEN, servers.deadline())).participants) == 2

    run_virtual(main())


class _Ahead:
    """A network whose servers' clocks are ahead of ours."""

    def __init__(self, network: MemoryNetwork, ahead_s: float) -> None:
        self._network = network
        self._ahead_s = ahead_s

    async def call(self, server: ServerRef, method: str, path: str, body: Any = None, **how: Any) -> Reply:
        reply = await self._network.call(server, method, path, body, **how)
        date = formatdate(VirtualClock().time() + self._ahead_s, usegmt=True)
        return Reply(reply.status, {**reply.headers, "date": date}, reply.body)


@pytest.mark.parametrize(("ahead_s", "warned"), [(0.4, False), (3.0, False), (7.0, True), (-90.0, True)])
def test_a_servers_clock_is_measured_compensated_and_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ahead_s: float, warned: bool
) -> None:
    async def main() -> None:
        servers = Counters(tmp_path).start()
        deployment = await discover([servers.ref("env")], _Ahead(servers.network, ahead_s), TOKEN, servers.deadline())
        [env] = deployment.participants
        deadline = Deadline.after(servers.clock, 10)
        expected = 0.0 if abs(ahead_s) < 1 else ahead_s
        assert env.skew_s == pytest.approx(expected, abs=0.6)
        assert env.deadline_ts(deadline) == pytest.approx(servers.clock.time() + 10 + expected, abs=0.6)

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    assert ("env" in caplog.text) == warned


def test_a_process_that_was_started_again_is_noticed_by_its_boot_id(tmp_path: Path) -> None:
    async def main() -> None:
        servers = Counters(tmp_path).start()
        deployment = await discover(servers.servers, servers.network, TOKEN, servers.deadline())
        await servers.stop(["tools"])
        servers.start(["tools"])
        now = (await statuses(deployment, servers.network, TOKEN, servers.deadline())).require()
        assert [p.instance for p in deployment.rebooted(now)] == ["tools"]
        assert deployment.updated(now).rebooted(now) == ()

    run_virtual(main())


def test_a_probe_tells_which_servers_see_our_directory(tmp_path: Path) -> None:
    async def main() -> None:
        servers = Counters(tmp_path).start()
        deployment = await discover(servers.servers, servers.network, TOKEN, servers.deadline())
        await asyncio.sleep(0)
        (tmp_path / "nonce").write_text("ab" * 16)
        elsewhere = PathMap((PathMapping(tmp_path, tmp_path / "other", "tools"),))
        answers = await probe(
            deployment, servers.network, TOKEN, tmp_path / "nonce", "ab" * 16, servers.deadline(), path_map=elsewhere
        )
        assert {name[1]: reply.seen for name, reply in answers.require().items()} == {
            "env": True,
            "agent": True,
            "policy": True,
            "tools": False,
        }

    run_virtual(main())


def test_the_most_precise_path_mapping_counts(tmp_path: Path) -> None:
    async def main() -> None:
        servers = Counters(tmp_path).start()
        deployment = await discover(servers.servers, servers.network, TOKEN, servers.deadline())
        env, agent = deployment.owner("env"), deployment.owner("agent")
        assert env is not None
        assert agent is not None
        mapped = PathMap(
            (
                PathMapping(Path("/runs"), Path("/mnt")),
                PathMapping(Path("/runs/a"), Path("/fast")),
                PathMapping(Path("/runs"), Path("/env"), "env"),
            )
        )
        assert mapped.seen_by(agent, Path("/runs/b/c")) == "/mnt/b/c"
        assert mapped.seen_by(agent, Path("/runs/a/c")) == "/fast/c"
        assert mapped.seen_by(env, Path("/runs/a/c")) == "/env/a/c"
        assert mapped.seen_by(agent, Path("/runsome/c")) == "/runsome/c"

    run_virtual(main())
