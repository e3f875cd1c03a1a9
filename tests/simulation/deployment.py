"""A whole deployment in one event loop: the real collector and real servers over a simulated network, disk and time.

Every process can be killed or stopped at any moment and started again; the disk can lose its power. Servers:
environment, agent, policy_model, workbench (exported), shell (restart_only), and the worker, which takes no part.
"""

import asyncio
import random
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import SecretStr

from gymckpt import jsoncodec
from gymckpt.collection import collector
from gymckpt.collection.collector import Summary
from gymckpt.collection.inputs import TaskInput
from gymckpt.collection.lock import Holder
from gymckpt.collection.opening import Ports
from gymckpt.collection.routing import Server
from gymckpt.collection.settings import CollectSettings
from gymckpt.collection.signals import Wishes
from gymckpt.errors import GymckptError
from gymckpt.identity import EpisodeId
from gymckpt.participant.participant import Participant
from gymckpt.ports import Lock, Reply, ServerRef
from gymckpt.roles.agent_options import AgentOptions
from gymckpt.roles.environment import EnvironmentOptions
from gymckpt.servers.agent import agent_app
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.environment import environment_app
from gymckpt.servers.model import ModelOptions, model_app
from gymckpt.servers.resources.app import resources_app
from gymckpt.servers.worker import worker_app
from gymckpt.settings import CheckpointSettings
from gymckpt.wire.control import PREFIX
from tests.simulation.files import MemoryFileSystem
from tests.simulation.network import Network
from tests.simulation.office import (
    EXPORTED_TASKSET,
    RESTART_TASKSET,
    Desk,
    Job,
    OfficeEngine,
    ReplayedDesk,
    RestartOnlyDesk,
    Worker,
)
from tests.simulation.office import row as task_row
from tests.simulation.processes import Process, ProcessClock, ProcessOffload, WorldLoop, current_process
from tests.simulation.transport import Exchange

T = TypeVar("T")

TOKEN = SecretStr("a-token-of-the-simulation")
GRACE_S = 120.0
HOME = PurePath("/sim")
RUN = HOME / "run"
PARTICIPANTS = ("environment", "agent", "policy_model", "workbench", "shell")
SERVERS = (*PARTICIPANTS, "worker")
AUDITED = ("policy_model", "workbench")
SETTLED_S = 30.0


class Disk(MemoryFileSystem):
    """Shared by all processes; a dead one cannot touch it, and its locks are gone."""

    def passing(self, operation: str, path: PurePath) -> None:
        process = current_process()
        if process is not None:
            process.check()
        super().passing(operation, path)

    def lock(self, path: PurePath) -> Lock:
        lock = super().lock(path)
        process = current_process()
        if process is not None:
            process.on_death.add(lock.release)
        return lock


@dataclass
class Life:
    """One collector process, from its start to its end."""

    number: int
    process: Process
    wishes: Wishes
    events: list[dict[str, Any]] = field(default_factory=list)
    summary: Summary | None = None
    error: BaseException | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def seen(self, event: str) -> int:
        """How often it told of this."""
        return sum(1 for told in self.events if told["event"] == event)


@dataclass
class _Server:
    process: Process
    participant: Participant | None = None


class Deployment:
    """The world of one run. Use inside its loop, through `run`; `close` it at the end."""

    def __init__(
        self,
        jobs: Sequence[Job],
        seed: int = 0,
        *,
        replayed: bool = False,
        lasting_ledger: bool = False,
        grace_s: float = GRACE_S,
        **settings: Any,
    ) -> None:
        self.jobs = list(jobs)
        self.rng = random.Random(seed)
        self.loop = WorldLoop()
        self.network = Network(self.rng)
        self.network.answered.append(self._answered)
        self.disk = Disk(now=self.loop.time)
        self.disk.make_root(HOME)
        self.lives: list[Life] = []
        self.servers: dict[str, _Server] = {}
        self.audit: dict[str, list[dict[str, Any]]] = {name: [] for name in AUDITED}
        self.resumed: dict[tuple[str, str], bytes | None] = {}
        """What a participant's manifest was when it had resumed that checkpoint."""
        self.checkpoints: dict[str, bytes] = {}
        """Every file of every checkpoint that was ever published."""
        self.settings: dict[str, Any] = {
            "concurrency": 3,
            "checkpoint_every": "6s",
            "max_attempts": 20,
            "keep": 50,
            "grace": 25.0,
            "commit_timeout": 60.0,
            "restore_timeout": 60.0,
            "server_timeout": 600.0,
            **settings,
        }
        self._replayed = replayed
        self._lasting_ledger = lasting_ledger
        self._grace_s = grace_s
        self._boots = 0
        self._processes: list[Process] = []
        self._begun: list[Process] = []
        self.run(self._boot_all())

    # Running

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, of the world itself, to its end."""
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        """Clear everything away."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            self.run(process.reap())
        left = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
        for task in left:
            task.cancel()
        if left:
            self.run(_gone(left))
        self.loop.close()

    def surprises(self) -> list[str]:
        """What the event loop was told of and nobody handled, in processes that live."""
        return [
            f"{told.get('message')}: {told.get('exception')!r}"
            for told in self.loop.errors
            if not str(told.get("message", "")).startswith("Task exception was never retrieved")
        ]

    # Servers

    @staticmethod
    def ref(name: str) -> ServerRef:
        return ServerRef(name, f"http://{name}")

    async def _boot_all(self) -> None:
        for name in SERVERS:
            await self.boot(name)

    async def boot(self, name: str) -> None:
        """Start a server, empty; nothing if it runs."""
        if name in self.servers and not self.servers[name].process.dead:
            return
        self._boots += 1
        skew_s = self.servers[name].process.skew_s if name in self.servers else 0.0
        server = _Server(self._process(name, skew_s))
        listening = asyncio.Event()
        server.process.run(self._serve(name, server, listening))
        self.servers[name] = server
        await listening.wait()

    async def _serve(self, name: str, server: _Server, listening: asyncio.Event) -> None:
        app = self._app(name, server.process)
        whole = app.app if isinstance(app, Worker) else app
        if not isinstance(app, Worker):
            server.participant = participant_of(whole)
        async with whole.router.lifespan_context(whole):
            self.network.serve(self.ref(name), app, server.process)
            listening.set()
            await asyncio.get_running_loop().create_future()

    def _app(self, name: str, process: Process) -> FastAPI | Worker:
        clock, offload, fs = ProcessClock(process), ProcessOffload(), self.disk
        settings = CheckpointSettings(
            enabled=True, control_auth_token=TOKEN, lease_grace_seconds=self._grace_s, root=Path(HOME)
        )
        refs = {server: self.ref(server) for server in SERVERS}
        match name:
            case "environment":
                tasksets = {EXPORTED_TASKSET: "workbench", RESTART_TASKSET: "shell"}
                options = EnvironmentOptions(agent="agent", tasksets=tasksets)
                return environment_app(
                    name, options, settings, refs, transport=self.network, clock=clock, fs=fs, offload=offload
                )
            case "agent":
                agent = AgentOptions(model="policy_model", resources_server="workbench")
                return agent_app(
                    name, agent, settings, refs, transport=self.network, clock=clock, fs=fs, offload=offload
                )
            case "policy_model":
                ledger = HOME / ("ledger" if self._lasting_ledger else f"ledger-{self._boots}")
                model = ModelOptions(backend="worker", ledger_dir=Path(ledger))
                neighbours = Neighbours(refs)
                return model_app(
                    name, model, settings, neighbours, transport=self.network, clock=clock, fs=fs, offload=offload
                )
            case "workbench":
                desk = (ReplayedDesk if self._replayed else Desk)(name, self._heard)
                return resources_app(desk, settings, clock=clock, fs=fs, offload=offload)
            case "shell":
                return resources_app(RestartOnlyDesk(name, self._heard), settings, clock=clock, fs=fs, offload=offload)
            case _:
                staging = Path(HOME / "staging")
                shared: dict[str, Any] = {"clock": clock, "fs": fs, "offload": offload}
                app = worker_app(name, OfficeEngine(), settings, staging_dir=staging, **shared)
                return Worker(app, self._heard)

    def kill(self, *names: str) -> None:
        """SIGKILL to servers."""
        for name in names:
            self.servers[name].process.kill()

    def power_cut(self) -> None:
        """All processes die and the disk keeps what it happened to have made durable."""
        self.kill(*SERVERS)
        for life in self.lives:
            self.kill_collector(life)
        survivor = self.disk.crashed(self.rng)
        self.disk._root, self.disk._next_inode = survivor._root, survivor._next_inode

    # Collectors

    @property
    def life(self) -> Life:
        """The newest collector."""
        return self.lives[-1]

    @property
    def collecting(self) -> bool:
        """Whether a collector runs."""
        return any(not life.ended.is_set() for life in self.lives)

    def collect(self, *, restore: bool | None = None, **settings: Any) -> Life:
        """Start a collector: `collect` at first, later whatever goes on with what stands there. Does not wait."""
        self._begun.append(process := self._process(f"collector-{len(self._begun)}"))
        life = Life(len(self._begun) - 1, process, Wishes())
        self.lives.append(life)
        process.on_death.add(life.ended.set)
        if restore is None:
            restore = (RUN / "run.json").as_posix() in self.disk.tree()
        chosen = CollectSettings(control_token=TOKEN, **{**self.settings, **settings})
        process.run(self._live(life, chosen, restore))
        return life

    async def _live(self, life: Life, settings: CollectSettings, restore: bool) -> None:
        clock = ProcessClock(life.process)
        holder = Holder("simulation", 1000 + life.number, str(life.number))
        ports = Ports(clock, self.disk, ProcessOffload(), self.network, self.network, holder=holder, lives=self._lives)
        servers = [Server(self.ref(name)) for name in PARTICIPANTS]

        def told(event: dict[str, Any]) -> None:
            life.events.append(event)
            if event["event"] == "checkpoint":
                self.remember_checkpoints()

        try:
            if restore:
                life.summary = await collector.restore(settings, RUN, servers, ports, on_event=told, wishes=life.wishes)
            else:
                source = self.source()
                settings = settings.model_copy(update={"tasks": source.name, "resume": True})
                life.summary = await collector.collect(
                    settings, RUN, servers, ports, on_event=told, wishes=life.wishes, source=source
                )
        except (GymckptError, OSError) as error:
            life.error = error
        except Exception as error:  # a bug: the check of the history shows it
            life.error = error
        life.process.over = True
        life.ended.set()

    def source(self) -> TaskInput:
        """The task rows."""
        lines = b"".join(jsoncodec.dumps(task_row(number, job)) + b"\n" for number, job in enumerate(self.jobs))
        return TaskInput("jobs", lambda: [lines])

    def _lives(self, holder: Holder) -> bool:
        process = self._begun[holder.pid - 1000]
        return not process.dead and not process.over

    def kill_collector(self, life: Life | None = None) -> None:
        """SIGKILL to a collector."""
        (life or self.life).process.kill()

    async def until(self, reached: Callable[[], bool], within_s: float = 1200.0) -> bool:
        """Let time pass until `reached()`; whether it was, in time and before the collector ended."""
        end_s = self.loop.time() + within_s
        while not reached():
            if self.loop.time() >= end_s or not self.collecting:
                return reached()
            await asyncio.sleep(0.1)
        return True

    async def until_quiet(self, end_s: float) -> None:
        """Let time pass until every participant is idle, at most until `end_s`."""
        participants = [server.participant for server in self.servers.values() if server.participant is not None]
        for _ in range(int((end_s - self.loop.time()) / 10) + 1):
            if all(participant.phase == "idle" for participant in participants):
                return
            await asyncio.sleep(10)

    async def finish(self, lives: int = 8) -> Life:
        """Without further trouble: servers up, and collectors one after the other until nothing is left to do."""
        self.network.faults.clear()
        for life in self.lives:
            life.process.let_go()
        for server in self.servers.values():
            server.process.let_go()
        for _ in range(lives):
            for name in SERVERS:
                await self.boot(name)
            if not self.collecting:
                self.collect()
            watching = [asyncio.ensure_future(life.ended.wait()) for life in self.lives]
            async with asyncio.timeout(40_000):
                await asyncio.wait(watching)
            if self.life.summary is not None and not self.life.summary.counts.unresolved:
                break
        return self.life

    # What is watched

    def _process(self, name: str, skew_s: float = 0.0) -> Process:
        process = Process(name, skew_s)
        self._processes.append(process)
        return process

    def _heard(self, server: str, episode: EpisodeId | None, call: int) -> None:
        if server in self.audit and episode is not None:
            self.audit[server].append(
                {"server": server, "rollout_id": episode.rollout_id, "attempt": episode.attempt, "call": call}
            )

    def _answered(self, exchange: Exchange, reply: Reply) -> None:
        if exchange.path == f"{PREFIX}/resume" and reply.status == 200:
            checkpoint_id = exchange.body["checkpoint_id"]
            self.resumed.setdefault((exchange.server, checkpoint_id), self.manifest(exchange.server, checkpoint_id))

    def manifest(self, server: str, checkpoint_id: str) -> bytes | None:
        """A participant's manifest in a checkpoint, if it stands there."""
        participant = self.servers[server].participant
        if participant is None:
            return None
        path = RUN / "checkpoints" / checkpoint_id / "gym" / participant.role.kind / server / "manifest.json"
        return self.disk.find(path)

    def remember_checkpoints(self) -> None:
        """Keep a copy of what is published now: it may be pruned later."""
        prefix = f"{RUN}/checkpoints/"
        tree = self.disk.tree(RUN / "checkpoints")
        published = {path[len(prefix) :].split("/")[0] for path in tree if path.endswith("/CHECKPOINT.json")}
        for path, data in tree.items():
            if path[len(prefix) :].split("/")[0] in published:
                self.checkpoints.setdefault(path, data)

    def copy_out(self) -> Path:
        """The run directory and every checkpoint that ever was, in a temporary directory of the real disk."""
        self.remember_checkpoints()
        memory = Path("/dev/shm")
        root = Path(tempfile.mkdtemp(prefix="gymckpt-simulated-", dir=memory if memory.is_dir() else None))
        for path, data in {**self.checkpoints, **self.disk.tree(RUN)}.items():
            copy = root / PurePath(path).relative_to(HOME)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(data)
        for name, lines in self.audit.items():
            (root / f"audit-{name}.jsonl").write_bytes(b"".join(jsoncodec.dumps(line) + b"\n" for line in lines))
        return root


def participant_of(app: FastAPI) -> Participant:
    """The participant that is mounted in an app."""
    for route in app.routes:
        if getattr(route, "path", None) == f"{PREFIX}/status":
            found = route.endpoint.__self__._participant  # type: ignore[attr-defined]
            assert isinstance(found, Participant)
            return found
    raise LookupError("no participant is mounted here")


async def _gone(tasks: list["asyncio.Task[Any]"]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)


def remove(root: Path) -> None:
    """Remove what `copy_out` made."""
    shutil.rmtree(root, ignore_errors=True)
