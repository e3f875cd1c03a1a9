"""From a directory to a run that this process holds: created from task rows, or read back from what stands there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from gymckpt.collection import events, runidentity
from gymckpt.collection.candidates import find_candidates
from gymckpt.collection.inputs import Lines, TaskInput, task_input
from gymckpt.collection.journals import Journals
from gymckpt.collection.lock import Holder, RunLock, process_lives
from gymckpt.collection.plan import write_plan
from gymckpt.collection.planfile import PlanReader
from gymckpt.collection.processes import Processes, nobody_tells
from gymckpt.collection.recovery import Candidate
from gymckpt.collection.routing import Routing, Server
from gymckpt.collection.run import Run
from gymckpt.collection.rundirectory import (
    Holding,
    RunPaths,
    RunRecord,
    clear_creation,
    delete_run,
    holding,
    read_run,
    write_run,
)
from gymckpt.collection.settings import CollectSettings, stored
from gymckpt.coordination import Deployment
from gymckpt.crashpoints import crash_point, declare
from gymckpt.errors import DamagedState, NotAsAsked, UsageError
from gymckpt.identity import new_run_id
from gymckpt.ports import Clock, FileSystem, Offload, Transport
from gymckpt.storage.checkpoints import CheckpointDirectory
from gymckpt.storage.durable import exists, make_directories, sync_directory
from gymckpt.storage.journalfiles import Position, newest_epoch
from gymckpt.storage.problems import Problem

BEFORE_PLAN = declare("collector.create.before_plan", "the run is locked, nothing of it is written")
BEFORE_RUN_JSON = declare("collector.create.before_run_json", "the plan is written, the run does not exist yet")
AFTER_RUN_JSON = declare("collector.create.after_run_json", "the run exists, nothing was dispatched")
AFTER_LOCK = declare("collector.resume.after_lock", "the run is locked, its epoch has not begun")
AFTER_EPOCH = declare("collector.resume.after_epoch", "the new epoch is in the journals, no server was asked")


@dataclass(frozen=True, slots=True)
class Ports:
    """The edges of a collector. `data` and `control` are transports of their own, so that neither delays the other."""

    clock: Clock
    fs: FileSystem
    offload: Offload
    data: Transport
    control: Transport
    processes: Processes = field(default_factory=nobody_tells)
    """Tells of servers without a control plane when they are another process."""
    holder: Holder | None = None
    lives: Callable[[Holder], bool] = process_lives


@dataclass(frozen=True, slots=True)
class Opened:
    """A run that this process holds, its state replayed."""

    paths: RunPaths
    record: RunRecord
    lock: RunLock
    journals: Journals
    run: Run
    plan: PlanReader
    checkpoints: CheckpointDirectory
    candidates: tuple[Candidate, ...]
    problems: tuple[Problem, ...]
    """What is wrong with checkpoints that are newer than the first candidate."""
    written: events.RowsWritten
    created: bool
    accepted: tuple[str, ...] = ()
    """Fields of the identity whose new values were accepted just now."""


def refuse_holding(root: PurePath, found: Holding, settings: CollectSettings, *, restore: bool) -> None:
    """Raise `UsageError`, `NotAsAsked` or `DamagedState` if what the directory holds is not what the user asked for."""
    if restore and found == "nothing":
        raise UsageError(f"{root} holds no run to restore", hint="start one with: gymckpt collect")
    if settings.overwrite and not restore:
        return
    if found == "begun":
        raise DamagedState(
            f"{root} has lost its run.json, yet holds recorded work",
            hint="bring run.json back from a copy; --overwrite deletes the run",
        )
    if found == "run" and not restore and not settings.resume:
        raise NotAsAsked(
            f"{root} already holds a run",
            hint=f"go on with it: gymckpt restore {root} (or --resume); --overwrite deletes it",
        )


class Opener:
    """Opens one run directory. The lock is released again if anything goes wrong."""

    def __init__(self, settings: CollectSettings, root: PurePath, ports: Ports, stopped: Callable[[], bool]) -> None:
        self._settings = settings
        self._ports = ports
        self._stopped = stopped
        self.paths = RunPaths(root)
        self.lock = RunLock(ports.fs, ports.offload, ports.clock, self.paths, holder=ports.holder, lives=ports.lives)

    async def holds_run(self, *, restore: bool) -> bool:
        """Take the lock, and say whether a run stands here to go on with; False: there is room for a new one.

        Raises `NotAsAsked`, `UsageError` or `DamagedState` for what the user did not ask for.
        """
        fs, offload = self._ports.fs, self._ports.offload
        found: Holding = await offload.run(lambda: holding(fs, self.paths))
        refuse_holding(self.paths.root, found, self._settings, restore=restore)
        await offload.run(lambda: make_directories(fs, self.paths.root))
        await self.lock.take(steal=self._settings.steal_lock)
        try:
            # Looked at again under the lock: another collector may have come first.
            found = await offload.run(lambda: holding(fs, self.paths))
            refuse_holding(self.paths.root, found, self._settings, restore=restore)
            if self._settings.overwrite and not restore:
                await offload.run(lambda: delete_run(fs, self.paths))
                return False
            if found == "nothing":
                await offload.run(lambda: clear_creation(fs, self.paths))
            return found == "run"
        except BaseException:
            await self.lock.release()
            raise

    async def create(self, servers: Sequence[Server], deployment: Deployment, source: TaskInput) -> Opened:
        """Plan, write, and make the directory a run."""
        settings, fs, offload = self._settings, self._ports.fs, self._ports.offload
        crash_point(BEFORE_PLAN)
        routing = Routing(with_kinds(servers, deployment), settings.routes, settings.agent)
        plan = await offload.run(lambda: write_plan(fs, self.paths.plan, source, settings, routing, self._stopped))
        if plan.largest_cohort > settings.concurrency:
            raise UsageError(
                f"a cohort has {plan.largest_cohort} rollouts, --concurrency is {settings.concurrency}: "
                "it would wait for ever",
                hint=f"give --concurrency {plan.largest_cohort} or more",
            )
        identity = runidentity.run_identity(settings, plan.input_sha256)
        runidentity.check_accepted(settings.accept_change, identity)
        record = RunRecord(
            run_id=new_run_id(),
            created_at=self._ports.clock.time(),
            identity=identity,
            plan=plan.summary,
            owners=plan.owners,
            largest_cohort=plan.largest_cohort,
            settings=stored(settings),
        )
        await offload.run(self._make_directories)
        crash_point(BEFORE_RUN_JSON)
        await self.lock.check()
        await offload.run(lambda: write_run(fs, self.paths, record))
        crash_point(AFTER_RUN_JSON)
        return await self._open(record, created=True)

    def _make_directories(self) -> None:
        for path in (self.paths.journal, self.paths.checkpoints):
            make_directories(self._ports.fs, path)
        sync_directory(self._ports.fs, self.paths.root)

    async def reopen(self, source: TaskInput | None) -> Opened:
        """Read the run back. `source` is what the command names: its identity must be the run's."""
        fs, offload = self._ports.fs, self._ports.offload
        crash_point(AFTER_LOCK)
        record = await offload.run(lambda: read_run(fs, self.paths))
        changes: list[runidentity.Difference] = []
        if source is not None:
            identity = await offload.run(lambda: runidentity.run_identity(self._settings, _sha256(source)))
            changes = await self._compare(record, identity)
        opened = await self._open(record, created=False)
        for change in changes:
            await opened.journals.append(events.IdentityChanged(change.name, change.old, change.new))
        opened = replace(opened, accepted=tuple(change.name for change in changes))
        crash_point(AFTER_EPOCH)
        return opened

    async def _compare(self, record: RunRecord, identity: Mapping[str, object]) -> list[runidentity.Difference]:
        ports = self._ports
        reader = await read_journals(ports.fs, ports.offload, ports.clock, self.paths, record.run_id)
        current = await self._ports.offload.run(lambda: current_identity(record, reader))
        return runidentity.check_identity(current, identity, self._settings.accept_change)

    async def _open(self, record: RunRecord, *, created: bool) -> Opened:
        ports = self._ports
        plan = await ports.offload.run(lambda: PlanReader(ports.fs, self.paths.plan, record.plan))
        checkpoints = CheckpointDirectory(ports.fs, ports.offload, self.paths.checkpoints)
        found, problems = await find_candidates(checkpoints, record.run_id)
        known = await known_positions(ports.fs, ports.offload, self.paths, record.run_id)
        journals = Journals(ports.fs, ports.offload, ports.clock, self.paths.journal, epoch=self.lock.epoch)
        await journals.open(known)
        await journals.append(events.EpochBegun(self.lock.epoch, str(self.lock.holder)))
        run = new_run(record)
        written = await ports.offload.run(lambda: journals.replay_into(run))
        return Opened(
            paths=self.paths,
            record=record,
            lock=self.lock,
            journals=journals,
            run=run,
            plan=plan,
            checkpoints=checkpoints,
            candidates=tuple(found),
            problems=tuple(problems),
            written=written,
            created=created,
        )


async def known_positions(
    fs: FileSystem, offload: Offload, paths: RunPaths, run_id: str
) -> Mapping[str, Position] | None:
    """How far the journals must reach, by the newest published checkpoint; its participants' parts are not read.

    Raises `DamagedState` where there are results and no journal at all.
    """
    await offload.run(lambda: _check_begun(fs, paths))
    listed = await CheckpointDirectory(fs, offload, paths.checkpoints).listing()
    published = [e.published for e in listed if e.published and e.published.collection.run_id == run_id]
    return max(published, key=lambda checkpoint: checkpoint.age).collection.journals if published else None


def _check_begun(fs: FileSystem, paths: RunPaths) -> None:
    results = [path for path in (paths.rollouts, paths.failures) if (entry := exists(fs, path)) and entry.size_bytes]
    if results and not newest_epoch(fs, paths.journal):
        raise DamagedState(
            f"{paths.journal} holds no journal, although {results[0].name} has rows",
            hint="restore the journal from a copy; nothing was changed",
        )


async def read_journals(fs: FileSystem, offload: Offload, clock: Clock, paths: RunPaths, run_id: str) -> Journals:
    """The journals for those who only look. Raises `DamagedState` naming file and line, also where they are shorter
    than a published checkpoint knows them."""
    known = await known_positions(fs, offload, paths, run_id)
    journals = Journals(fs, offload, clock, paths.journal)
    await journals.inspect(known)
    return journals


def new_run(record: RunRecord) -> Run:
    """The state of a run before its journals are replayed."""
    plan = record.plan
    return Run(record.run_id, planned=plan.rollouts, rows=plan.rows, max_repeats=plan.max_repeats)


def current_identity(record: RunRecord, journals: Journals) -> dict[str, object]:
    """The run's identity with the changes that the user accepted since. Blocking."""
    identity = dict(record.identity)
    for event in journals.replay_events():
        if isinstance(event, events.IdentityChanged):
            identity[event.name] = event.new
    return identity


def with_kinds(servers: Sequence[Server], deployment: Deployment) -> tuple[Server, ...]:
    """The servers with the kinds that their status told."""
    kinds = {participant.server.instance: participant.kind for participant in deployment.participants}
    return tuple(replace(server, kind=server.kind or kinds.get(server.ref.instance)) for server in servers)


def source_of(settings: CollectSettings) -> TaskInput | None:
    """The task rows that the settings name, if any; raises `UsageError` where they cannot be."""
    return None if settings.tasks is None else task_input(settings.tasks)


def _sha256(source: TaskInput) -> str:
    lines = Lines(source.open())
    for _ in lines:
        pass
    return lines.sha256
