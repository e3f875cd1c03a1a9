"""A whole deployment in one process on virtual time: real environment, agent and resources servers over an in-memory
network, and a model of a few lines that tests hold by the hand."""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI, Request, Response
from pydantic import SecretStr

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.ports import Deadline, Reply, ServerRef
from gymckpt.roles.agent_options import AgentOptions
from gymckpt.roles.agent_sessions import Connect, connect_nothing
from gymckpt.roles.environment import EnvironmentOptions
from gymckpt.servers.agent import agent_app
from gymckpt.servers.environment import environment_app
from gymckpt.servers.resources.app import resources_app
from gymckpt.servers.resources.server import Call, ResourcesServer, Seed, Verification, tool
from gymckpt.settings import CheckpointSettings
from gymckpt.wire.control import PREFIX, VerifyMode
from tests.simulation.clock import InlineOffload, VirtualClock
from tests.simulation.transport import MemoryNetwork

TOKEN = "town"
ORDER = ("environment", "agent", "counter")


class Hold:
    """Something a test stops at a named place, and lets go."""

    def __init__(self) -> None:
        self._gates: dict[Any, asyncio.Event] = {}
        self.reached: dict[Any, asyncio.Event] = {}

    def at(self, place: Any) -> None:
        """Stop whoever comes to `place`."""
        self._gates[place] = asyncio.Event()
        self.reached[place] = asyncio.Event()

    def let_go(self, place: Any) -> None:
        self._gates[place].set()

    async def passing(self, place: Any) -> None:
        """Called at `place`."""
        if place in self._gates:
            self.reached[place].set()
            await self._gates[place].wait()


class Counter(ResourcesServer):
    """One number for each session; the tool `add` raises it, the verifier wants the right one."""

    checkpoint_mode: ClassVar[Any] = "exported"

    def __init__(self, hold: Hold, audit: list[tuple[str, int]]) -> None:
        super().__init__("counter")
        self.totals: dict[str, int] = {}
        self.verified = 0
        self._hold = hold
        self._audit = audit

    async def seed_session(self, seed: Seed) -> None:
        await self._hold.passing("seed")
        self.totals[seed.session_id] = 0

    @tool
    async def add(self, call: Call, *, amount: int) -> Any:
        total = self.totals[call.session_id]
        self._audit.append((str(call.episode), total))
        await self._hold.passing(("add", total))
        self.totals[call.session_id] = total + amount
        return {"total": total + amount}

    async def verify(self, verification: Verification) -> dict[str, Any]:
        await self._hold.passing("verify")
        self.verified += 1
        wanted = verification.body["wanted"]
        return {"reward": 1.0 if self.totals[verification.session_id or ""] == wanted else 0.0}

    async def export_session_state(self, session_id: str) -> Any:
        return self.totals[session_id]

    async def restore_session_state(self, session_id: str, state: Any) -> None:
        self.totals[session_id] = state

    async def retire_session_state(self, session_id: str) -> None:
        self.totals.pop(session_id, None)


class ReplayedCounter(Counter):
    """Its verifier may run twice."""

    checkpoint_verify: ClassVar[VerifyMode] = "replay"


class RestartOnlyCounter(Counter):
    """It cannot capture anything."""

    checkpoint_mode: ClassVar[Any] = "restart_only"


def model_app(rounds: int, hold: Hold, calls: list[tuple[str, int]]) -> FastAPI:
    """Asks for `add` in `rounds` rounds, then answers. `calls` holds (path, tool outputs seen) of every request."""
    app = FastAPI()

    async def respond(request: Request) -> Response:
        body = jsoncodec.loads(await request.body())
        seen = sum(1 for item in body["input"] if item.get("type") == "function_call_output")
        calls.append((request.url.path, seen))
        await hold.passing(("model", seen))
        if seen < rounds:
            arguments = jsoncodec.dumps({"amount": 1}).decode()
            item: dict[str, Any] = {"type": "function_call", "call_id": f"c{seen}", "name": "add"}
            output = [{**item, "arguments": arguments}]
        else:
            content = [{"type": "output_text", "text": f"{seen} rounds"}]
            output = [{"type": "message", "role": "assistant", "content": content}]
        usage = {"input_tokens": 10, "output_tokens": 1, "total_tokens": 11}
        reply = {"id": f"resp_{seen}", "object": "response", "output": output, "usage": usage}
        return Response(jsoncodec.dumps(reply), media_type="application/json")

    app.add_api_route("/v1/responses", respond, methods=["POST"])
    app.add_api_route("/ng-rollout/{key}/v1/responses", respond, methods=["POST"])
    return app


class Town:
    """The deployment and its controller."""

    def __init__(
        self,
        root: Path,
        *,
        rounds: int = 3,
        counter: type[Counter] = Counter,
        checkpoints: bool = True,
        agent: dict[str, Any] | None = None,
        environment: dict[str, Any] | None = None,
        connect: Connect = connect_nothing,
        hold: Hold | None = None,
    ) -> None:
        self.root = root
        self.clock = VirtualClock()
        self.network = MemoryNetwork()
        self.hold = hold or Hold()
        self.calls: list[tuple[str, int]] = []
        self.audit: list[tuple[str, int]] = []
        self.roles: dict[str, Any] = {}
        self.counter = counter(self.hold, self.audit)
        self._counter_class = counter
        self._rounds = rounds
        self._agent = {"model": "model", "resources_server": "counter", **(agent or {})}
        self._environment = {"agent": "agent", "tasksets": {"sums": "counter"}, **(environment or {})}
        self._connect = connect
        self._sequence = 0
        self._settings = CheckpointSettings(enabled=True, control_auth_token=SecretStr(TOKEN))
        if not checkpoints:
            self._settings = CheckpointSettings()
        names = ("environment", "agent", "counter", "model")
        self.servers = {name: ServerRef(name, f"http://{name}") for name in names}
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        """Bring a server up, empty."""
        shared: dict[str, Any] = {"clock": self.clock, "offload": InlineOffload()}
        match name:
            case "environment":
                options = EnvironmentOptions.model_validate(self._environment)
                app = environment_app(name, options, self._settings, self.servers, transport=self.network, **shared)
            case "agent":
                agent = AgentOptions.model_validate(self._agent)
                shared["connect"] = self._connect
                app = agent_app(name, agent, self._settings, self.servers, transport=self.network, **shared)
            case "counter":
                self.counter = self._counter_class(self.hold, self.audit)
                app = resources_app(self.counter, self._settings, **shared)
            case _:
                app = model_app(self._rounds, self.hold, self.calls)
        self.roles[name] = getattr(app.state, "role", None)
        self.network.serve(self.servers[name], app)

    async def kill(self, *names: str) -> None:
        """As SIGKILL: what runs is gone, nobody is told."""
        for name in names:
            self.network.take_down(self.servers[name])
            if self.roles[name] is not None:
                await self.roles[name].aclose()

    def run(self, attempt: int = 0, *, rollout: str = "r", wanted: int | None = None) -> "asyncio.Task[Reply]":
        """`POST /run`, typed."""
        task_input = {
            "responses_create_params": {"input": "add up"},
            "task_data": {"wanted": self._rounds if wanted is None else wanted},
        }
        body = {
            "episode_id": {"rollout_id": rollout, "attempt": attempt},
            "task": {"task_id": {"taskset": "sums", "task_id": "1"}, "task_input": task_input},
        }
        return self.post("environment", "/run", body)

    def post(self, server: str, path: str, body: Any, **options: Any) -> "asyncio.Task[Reply]":
        """A request in the background."""
        deadline = Deadline.after(self.clock, 100_000)
        return asyncio.create_task(
            self.network.call(self.servers[server], "POST", path, body, deadline=deadline, **options)
        )

    async def control(self, server: str, operation: str, /, **body: Any) -> dict[str, Any]:
        """One control call that must succeed."""
        reply = await self.ask(server, operation, **body)
        assert reply.status == 200, (operation, server, reply.body)
        found: dict[str, Any] = jsoncodec.loads(reply.body)
        return found

    async def ask(self, server: str, operation: str, /, **body: Any) -> Reply:
        """One control call, whatever it answers."""
        deadline = Deadline.after(self.clock, 1000)
        headers = {"authorization": f"Bearer {TOKEN}"}
        if operation == "status":
            return await self.network.call(
                self.servers[server], "GET", f"{PREFIX}/status", deadline=deadline, headers=headers
            )
        sent = {"deadline_ts": self.clock.time() + 30, **body}
        return await self.network.call(
            self.servers[server], "POST", f"{PREFIX}/{operation}", sent, deadline=deadline, headers=headers
        )

    def next_id(self) -> str:
        self._sequence += 1
        return f"ckpt-{self._sequence:06d}-0000000{self._sequence % 10}"

    def directory(self, checkpoint_id: str) -> str:
        path = self.root / checkpoint_id
        path.mkdir(exist_ok=True)
        return str(path)

    async def prepare(self, checkpoint_id: str, servers: tuple[str, ...] = ORDER, within_s: float = 30) -> bool:
        """Stage by stage; whether all became ready."""
        for server in servers:
            deadline_ts = self.clock.time() + within_s
            reply = await self.control(server, "prepare", checkpoint_id=checkpoint_id, deadline_ts=deadline_ts)
            if reply["phase"] != "prepared":
                return False
        return True

    async def commit(self, checkpoint_id: str) -> dict[str, dict[str, Any]]:
        """Everywhere, everything."""
        directory = self.directory(checkpoint_id)
        return {
            server: await self.control(
                server, "commit", checkpoint_id=checkpoint_id, checkpoint_dir=directory, episode_ids=None
            )
            for server in ORDER
        }

    async def resume(self, checkpoint_id: str) -> None:
        for server in reversed(ORDER):
            await self.control(server, "resume", checkpoint_id=checkpoint_id)

    async def checkpoint(self) -> tuple[str, dict[str, dict[str, Any]]]:
        """A whole one."""
        checkpoint_id = self.next_id()
        assert await self.prepare(checkpoint_id)
        committed = await self.commit(checkpoint_id)
        await self.resume(checkpoint_id)
        return checkpoint_id, committed

    async def restore(self, source: str, *episodes: EpisodeId) -> None:
        """Into all servers, and resumed."""
        checkpoint_id = self.next_id()
        named = [{"rollout_id": e.rollout_id, "attempt": e.attempt} for e in episodes]
        for server in ORDER:
            await self.control(
                server,
                "restore",
                checkpoint_id=checkpoint_id,
                checkpoint_dir=self.directory(source),
                episode_ids=named,
            )
        await self.resume(checkpoint_id)

    async def retire(self, *episodes: EpisodeId, servers: tuple[str, ...] = ORDER) -> None:
        named = [{"rollout_id": e.rollout_id, "attempt": e.attempt} for e in episodes]
        for server in servers:
            await self.control(server, "retire", checkpoint_id=self.next_id(), episode_ids=named)


def json_of(reply: Reply) -> dict[str, Any]:
    """The object in a reply."""
    found: dict[str, Any] = jsoncodec.loads(reply.body)
    return found


async def soon(times: int = 200) -> None:
    """Let everything that can go on do so, without time passing."""
    for _ in range(times):
        await asyncio.sleep(0)


async def finished(task: "asyncio.Task[Reply]") -> dict[str, Any]:
    """The JSON of a 200."""
    reply = await task
    assert reply.status == 200, reply.body
    return json_of(reply)
