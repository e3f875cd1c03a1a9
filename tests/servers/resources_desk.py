"""A resources server's app on an in-memory network, and short ways to say what its callers say."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import SecretStr

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.ports import Deadline, Reply, ServerRef
from gymckpt.servers.resources.app import resources_app
from gymckpt.servers.resources.server import ResourcesServer
from gymckpt.settings import CheckpointSettings
from gymckpt.wire.control import PREFIX
from gymckpt.wire.gym import rollout_path
from tests.simulation.clock import InlineOffload, VirtualClock
from tests.simulation.transport import MemoryNetwork

TOKEN = "secret"
OFF = CheckpointSettings()


def on(root: Path) -> CheckpointSettings:
    return CheckpointSettings(enabled=True, control_auth_token=SecretStr(TOKEN), root=root, lease_grace_seconds=60.0)


def value(reply: Reply) -> Any:
    return jsoncodec.loads(reply.body)


def code(reply: Reply) -> str:
    """The code of a refusal."""
    return f"{reply.status} {value(reply)['error']['code']}"


@dataclass
class Caller:
    """Whoever holds a session: the cookie that came with the seed, and the caller's own id for it."""

    desk: "Desk"
    episode: EpisodeId
    caller_id: str
    cookies: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    async def seed(self, task_data: dict[str, Any] | None = None) -> Reply:
        body = {
            "resources_session_id": self.caller_id,
            "episode_id": {"rollout_id": self.episode.rollout_id, "attempt": self.episode.attempt},
            "task_id": {"taskset": "t", "task_id": "1"},
            "task_data": task_data or {},
        }
        reply = await self.desk.post("/seed_session", body)
        self.cookies = dict(reply.cookies) or self.cookies
        self.headers = dict(reply.headers)
        return reply

    async def tool(self, name: str, arguments: dict[str, Any] | None = None, *, prefixed: bool = False) -> Reply:
        path = rollout_path(self.episode, f"/{name}") if prefixed else f"/{name}"
        return await self.desk.post(path, arguments or {}, self.cookies)

    async def use(self, name: str, arguments: dict[str, Any]) -> Any:
        """A tool's answer; fails where the call was refused."""
        reply = await self.tool(name, arguments)
        assert reply.status == 200, reply
        return value(reply)

    async def verify(self, body: dict[str, Any] | None = None) -> Reply:
        return await self.desk.post("/verify", body or {"response": {"output": []}}, self.cookies)

    async def close(self) -> Reply:
        reference = {"rollout_id": self.episode.rollout_id, "attempt": self.episode.attempt}
        body = {"resources_session_id": self.caller_id, "episode_id": reference}
        return await self.desk.post("/close_session", body, self.cookies)

    def next_attempt(self) -> "Caller":
        """The replacement: the next attempt, with the same cookie."""
        return Caller(self.desk, self.episode.next, self.caller_id, dict(self.cookies))


class Desk:
    """One server process after another under the same name and URL; `boot` starts an empty one."""

    def __init__(self, server: ResourcesServer, settings: CheckpointSettings) -> None:
        self.network = MemoryNetwork()
        self.clock = VirtualClock()
        self.settings = settings
        self.ref = ServerRef(server.instance, "http://resources")
        self.app: FastAPI
        self.boot(server)

    def boot(self, server: ResourcesServer) -> None:
        self.network.take_down(self.ref)
        self.app = resources_app(server, self.settings, clock=self.clock, offload=InlineOffload())
        self.network.serve(self.ref, self.app)

    def caller(self, rollout_id: str, attempt: int = 0, caller_id: str | None = None) -> Caller:
        return Caller(self, EpisodeId(rollout_id, attempt), caller_id or f"resources-{rollout_id}-{attempt}")

    async def post(self, path: str, body: Any, cookies: dict[str, str] | None = None) -> Reply:
        deadline = Deadline.after(self.clock, 3600.0)
        return await self.network.call(self.ref, "POST", path, body, deadline=deadline, cookies=cookies)

    async def control(self, operation: str, checkpoint_id: str, *, seconds: float = 30.0, **fields: Any) -> Reply:
        body = {"checkpoint_id": checkpoint_id, "deadline_ts": self.clock.time() + seconds, **fields}
        headers = {"authorization": f"Bearer {TOKEN}"}
        deadline = Deadline.after(self.clock, 3600.0)
        return await self.network.call(
            self.ref, "POST", f"{PREFIX}/{operation}", body, deadline=deadline, headers=headers
        )

    async def done(self, operation: str, checkpoint_id: str, **fields: Any) -> Any:
        """The answer of a control call that succeeds."""
        reply = await self.control(operation, checkpoint_id, **fields)
        assert reply.status == 200, reply
        return value(reply)

    async def status(self) -> Any:
        deadline, headers = Deadline.after(self.clock, 60.0), {"authorization": f"Bearer {TOKEN}"}
        reply = await self.network.call(self.ref, "GET", f"{PREFIX}/status", deadline=deadline, headers=headers)
        return value(reply)

    async def checkpoint(self, checkpoint_id: str, directory: Path) -> Any:
        """Prepare, commit everything, resume; the commit's answer."""
        assert (await self.done("prepare", checkpoint_id))["phase"] == "prepared"
        committed = await self.done("commit", checkpoint_id, checkpoint_dir=str(directory), episode_ids=None)
        await self.done("resume", checkpoint_id)
        return committed

    async def restore(self, checkpoint_id: str, directory: Path, *episodes: EpisodeId) -> Any:
        """Restore and resume; the restore's answer."""
        named = [{"rollout_id": e.rollout_id, "attempt": e.attempt} for e in episodes]
        restored = await self.done("restore", checkpoint_id, checkpoint_dir=str(directory), episode_ids=named)
        await self.done("resume", checkpoint_id)
        return restored

    async def retire(self, checkpoint_id: str, episode: EpisodeId) -> Any:
        named = [{"rollout_id": episode.rollout_id, "attempt": episode.attempt}]
        return await self.done("retire", checkpoint_id, episode_ids=named)
