"""A small deployment in memory: real participants with counters for episodes, on virtual time and real files.

environment `env` (owns the episodes), agent `agent`, model `policy`, resources `tools`; plain server `judge`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI
from pydantic import SecretStr

from gymckpt.identity import EpisodeId, Kind
from gymckpt.participant.participant import Participant
from gymckpt.participant.routes import mount
from gymckpt.ports import Deadline, ServerRef
from gymckpt.settings import CheckpointSettings
from gymckpt.storage.files import LocalFileSystem
from gymckpt.storage.records import Boundary, ExportedRecord, Needs
from tests.participant.roles import CounterRole
from tests.simulation.clock import InlineOffload, VirtualClock
from tests.simulation.transport import MemoryNetwork

TOKEN = SecretStr("a-token-of-the-tests")
GRACE_S = 60.0
KINDS: dict[str, Kind] = {"env": "environment", "agent": "agent", "policy": "model", "tools": "resources"}


class SimulatedRole(CounterRole):
    """A counter whose boundary needs what the episode was told that it needs."""

    def __init__(self, kind: Kind, instance: str) -> None:
        super().__init__(kind, instance)
        self.needs: dict[str, Needs] = {}

    def record(self, episode: EpisodeId, history: list[int]) -> ExportedRecord:
        owner = self.kind in ("environment", "agent")
        return ExportedRecord(
            episode,
            {"episode_id": {"rollout_id": episode.rollout_id, "attempt": episode.attempt}, "history": history},
            Boundary("bump", len(history), 1.0) if history and owner else None,
            needs=self.needs.get(episode.rollout_id, ()) if owner else None,
            lists={"/history": len(history)},
        )


@dataclass
class Counters:
    """The servers of a deployment, which can die and be started again, empty."""

    directory: Path
    clock: VirtualClock = field(default_factory=VirtualClock)
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    grace_s: float = GRACE_S
    roles: dict[str, SimulatedRole] = field(default_factory=dict)
    participants: dict[str, Participant] = field(default_factory=dict)
    fs: LocalFileSystem = field(default_factory=LocalFileSystem)
    offload: InlineOffload = field(default_factory=InlineOffload)

    def start(self, names: Iterable[str] = KINDS) -> "Counters":
        """Start (or start again, empty) these servers, and the plain one."""
        for name in names:
            role = SimulatedRole(KINDS[name], name)
            app = FastAPI()
            settings = CheckpointSettings(
                enabled=True, control_auth_token=TOKEN, lease_grace_seconds=self.grace_s, root=self.directory
            )
            participant = mount(app, role, settings, clock=self.clock, fs=self.fs, offload=self.offload)
            assert participant is not None
            self.roles[name], self.participants[name] = role, participant
            self.network.serve(self.ref(name), app)
        self.network.serve(self.ref("judge"), FastAPI())
        return self

    async def stop(self, names: Iterable[str] = tuple(KINDS)) -> None:
        """As SIGKILL does."""
        for name in names:
            self.network.take_down(self.ref(name))
            await self.participants[name].close()

    @staticmethod
    def ref(name: str) -> ServerRef:
        return ServerRef(name, f"memory://{name}")

    @property
    def servers(self) -> list[ServerRef]:
        return [self.ref(name) for name in (*KINDS, "judge")]

    def deadline(self, seconds: float = 30.0) -> Deadline:
        return Deadline.after(self.clock, seconds)

    async def run_episode(self, episode: EpisodeId, bumps: int = 2, *, on: Iterable[str] = KINDS) -> None:
        """An episode that lives on these servers, has reached a boundary, and needs all of them but its owner."""
        names = list(on)
        for name in names:
            role = self.roles[name]
            if episode not in role.counts:
                role.start(episode)
                if name == "env":
                    role.needs[episode.rollout_id] = tuple((KINDS[n], n) for n in names if n != "env")
            for _ in range(bumps):
                await role.bump(episode)

    def live(self) -> set[str]:
        """Everything that lives on any server."""
        return {key for role in self.roles.values() for key in role.live()}

    def closed(self) -> list[str]:
        """Servers whose admission is closed."""
        return [name for name, role in self.roles.items() if not role.gate.is_open]
