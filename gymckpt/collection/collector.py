"""The collector: from settings, servers and a directory to a finished, or resumable, run.

`collect` begins a run or goes on with one; `restore` only goes on. Both take their edges as `Ports`, so that a
simulated deployment runs the same code.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeVar

from gymckpt import coordination
from gymckpt.collection import events
from gymckpt.collection.aggregates import aggregate
from gymckpt.collection.dryrun import finished, try_out
from gymckpt.collection.feed import count_unfinished
from gymckpt.collection.inputs import TaskInput
from gymckpt.collection.metrics import Metrics, compute
from gymckpt.collection.opening import Opened, Opener, Ports, refuse_holding, source_of
from gymckpt.collection.preflight import preflight
from gymckpt.collection.progress import LastCheckpoint, OnEvent, Progress
from gymckpt.collection.routing import Server
from gymckpt.collection.run import Counts
from gymckpt.collection.rundirectory import Holding, RunPaths, holding
from gymckpt.collection.session import Session
from gymckpt.collection.settings import CollectSettings
from gymckpt.collection.signals import Wishes
from gymckpt.collection.snapshot import snapshot
from gymckpt.collection.stopping import stop
from gymckpt.collection.ticking import Ticker
from gymckpt.coordination import Deployment, PathMap, PathMapping
from gymckpt.errors import GymckptError, NotAsAsked, StoppedResumable, UsageError
from gymckpt.ports import Deadline
from gymckpt.storage import durable

T = TypeVar("T")

EXIT_COMPLETE = 0
EXIT_SOME_FAILED = 1
EXIT_RESUMABLE = 75

LEAVE_S = 10.0
"""How long a collector that is done may take to clear the servers of what it finished last."""

OnProgress = Callable[[Callable[[], Progress]], None]
"""Given a function that takes a snapshot, once there is something to see."""


@dataclass(frozen=True, slots=True)
class Summary:
    """How a collector ended."""

    run_id: str
    directory: PurePath
    counts: Counts
    exit_code: int
    attempts: int
    """Attempts dispatched in all: not samples."""
    restored: int
    elapsed_s: float
    last_checkpoint: LastCheckpoint | None
    nothing_to_resume: bool = False
    stopped: str | None = None
    """Why it ended before everything had an outcome; the run can be resumed."""
    metrics: Metrics | None = None
    """Over every sample of the run; None while rollouts are unresolved."""
    dry_run: bool = False
    """Nothing was done; the counts are what would be."""

    @property
    def resume_command(self) -> str | None:
        """What to type to go on; None if nothing is left."""
        return f"gymckpt restore {self.directory}" if self.counts.unresolved and not self.dry_run else None


async def collect(
    settings: CollectSettings,
    root: PurePath,
    servers: Sequence[Server],
    ports: Ports,
    *,
    on_event: OnEvent = lambda event: None,
    on_progress: OnProgress = lambda progress: None,
    wishes: Wishes | None = None,
    source: TaskInput | None = None,
) -> Summary:
    """Begin a run in `root` (absolute), or with `settings.resume` go on with the one there. `source` overrides where
    `settings.tasks` says that rows come from.

    Raises the errors of the tree; what was recorded before stands and can be resumed.
    """
    rows = source or source_of(settings)
    if rows is None:
        raise UsageError("no task rows", hint="give a .jsonl file, - for stdin, or a bundled @set")
    return await _Collector(settings, root, servers, ports, on_event, on_progress, wishes).run(rows, restore=False)


async def restore(
    settings: CollectSettings,
    root: PurePath,
    servers: Sequence[Server],
    ports: Ports,
    *,
    on_event: OnEvent = lambda event: None,
    on_progress: OnProgress = lambda progress: None,
    wishes: Wishes | None = None,
) -> Summary:
    """Go on with the run in `root` (absolute). A finished run: nothing to resume, exit code 0. Raises as `collect`."""
    return await _Collector(settings, root, servers, ports, on_event, on_progress, wishes).run(None, restore=True)


class _Collector:
    def __init__(
        self,
        settings: CollectSettings,
        root: PurePath,
        servers: Sequence[Server],
        ports: Ports,
        on_event: OnEvent,
        on_progress: OnProgress,
        wishes: Wishes | None,
    ) -> None:
        self._settings = settings
        self._root = root
        self._servers = servers
        self._ports = ports
        self._on_event = on_event
        self._on_progress = on_progress
        self._wishes = wishes or Wishes()
        self._begun_s = ports.clock.monotonic()
        self._path_map = path_map(settings.path_map)
        self._grace_ends: Deadline | None = None

    async def run(self, source: TaskInput | None, *, restore: bool) -> Summary:
        if self._settings.dry_run:
            return await self._dry_run(source, restore=restore)
        opener = Opener(self._settings, self._root, self._ports, lambda: self._wishes.stopped)
        exists = await self._unless_stopped(opener.holds_run(restore=restore), "before the run existed")
        try:
            return await self._held(opener, source, exists)
        except OSError as error:
            raise durable.write_error(error, self._root) from error
        finally:
            await opener.lock.release()

    async def _held(self, opener: Opener, source: TaskInput | None, exists: bool) -> Summary:
        opened, deployment = await self._open(opener, source, exists)
        try:
            return await self._carry_out(opened, deployment)
        finally:
            with suppress(GymckptError):
                await opened.journals.close()

    async def _open(self, opener: Opener, source: TaskInput | None, exists: bool) -> tuple[Opened, Deployment | None]:
        if exists:
            opened = await self._unless_stopped(opener.reopen(source), "while the run was being read")
            if not opened.run.counts.unresolved:
                return opened, None
            deployment = await self._unless_stopped(self._discover(), "before anything was dispatched")
            self._check_owners(opened)
            await self._unless_stopped(self._look_ahead(deployment), "before anything was dispatched")
            return opened, deployment
        assert source is not None
        deployment = await self._unless_stopped(self._discover(), "before the run existed")
        await self._unless_stopped(self._look_ahead(deployment), "before the run existed")
        creating = opener.create(self._servers, deployment, source)
        return await self._unless_stopped(creating, "before the run existed"), deployment

    async def _dry_run(self, source: TaskInput | None, *, restore: bool) -> Summary:
        fs, offload = self._ports.fs, self._ports.offload
        found: Holding = await offload.run(lambda: holding(fs, RunPaths(self._root)))
        refuse_holding(self._root, found, self._settings, restore=restore)
        tried = None if self._settings.overwrite else await finished(self._ports, self._root)
        if tried is None:
            deployment = await self._unless_stopped(self._discover(), "before anything was sent")
            trying = try_out(self._settings, self._ports, self._root, self._servers, deployment, self._path_map, source)
            tried = await self._unless_stopped(trying, "before anything was sent")
        for text in tried.said:
            self._on_event({"event": "note", "text": text})
        return Summary(
            run_id=tried.run_id,
            directory=self._root,
            counts=tried.counts,
            exit_code=EXIT_COMPLETE,
            attempts=0,
            restored=0,
            elapsed_s=self._ports.clock.monotonic() - self._begun_s,
            last_checkpoint=None,
            dry_run=True,
        )

    async def _look_ahead(self, deployment: Deployment) -> None:
        looked = await preflight(
            self._servers,
            deployment,
            self._ports.control,
            self._settings.token(),
            self._ports.clock,
            self._ports.fs,
            self._ports.offload,
            self._root,
            self._path_map,
            checkpoints=str(self._settings.checkpoint_every) != "off",
            timeout_s=self._settings.control_timeout,
        )
        for warning in looked.warnings:
            self._on_event({"event": "note", "text": warning})

    async def _discover(self) -> Deployment:
        if not self._servers:
            raise UsageError("no servers", hint="give --url NAME=URL, --gym-head URL or --serve")
        limit = Deadline.after(self._ports.clock, self._settings.control_timeout)
        refs = [server.ref for server in self._servers]
        return await coordination.discover(refs, self._ports.control, self._settings.token(), limit)

    def _check_owners(self, opened: Opened) -> None:
        known = {server.ref.instance for server in self._servers}
        if missing := sorted(set(opened.record.owners) - known):
            raise NotAsAsked(
                f"the plan sends rollouts to {', '.join(missing)}, which is not among the servers",
                hint=f"give --url {missing[0]}=URL",
            )

    async def _carry_out(self, opened: Opened, deployment: Deployment | None) -> Summary:
        self._on_event({"event": "started", "run_id": opened.run.run_id, "pid": opened.lock.holder.pid})
        if opened.accepted:
            told = f"{', '.join(opened.accepted)}: accepted as another value; the rollouts stay as they were planned"
            self._on_event({"event": "note", "text": told})
        session = Session(
            self._settings,
            self._ports,
            self._servers,
            deployment or Deployment(()),
            opened,
            self._path_map,
            self._on_event,
        )
        ticker = Ticker(session, self._wishes)
        self._on_progress(lambda: snapshot(session, ticker))
        try:
            if deployment is None:
                await session.files.open(opened.written, opened.journals, opened.run.opening)
                return await self._leave(session, nothing_to_resume=True)
            await self._unless_stopped(session.set_up(), "before anything was dispatched")
            stopped = await self._work(session, ticker)
            return await self._leave(session, stopped=stopped)
        except GymckptError as error:
            await self._leave_after(session, error)
            raise
        except OSError as error:
            named = durable.write_error(error, opened.paths.root)
            await self._leave_after(session, named)
            raise named from error
        finally:
            await session.files.close()

    async def _work(self, session: Session, ticker: Ticker) -> str | None:
        """Until everything has an outcome, or somebody asked to stop: then why."""
        dispatching = asyncio.create_task(session.dispatch())
        ticking = asyncio.create_task(ticker.serve())
        asked = asyncio.create_task(self._wishes.stop.wait())
        beside = [asyncio.ensure_future(work()) for work in session.background()]
        everything: set[asyncio.Future[Any]] = {dispatching, ticking, asked, *beside}
        try:
            waiting = set(everything)
            while not dispatching.done() and not asked.done():
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
            if dispatching.done():
                dispatching.result()
                return None
            self._grace_ends = await stop(session, ticker, dispatching, ticking, self._wishes)
            return "stopped as asked"
        finally:
            for task in everything:
                task.cancel()
            await asyncio.wait(everything)
            await session.dispatcher.halt()
            for task in everything:
                if not task.cancelled():
                    task.exception()

    async def _leave(self, session: Session, *, stopped: str | None = None, nothing_to_resume: bool = False) -> Summary:
        """Write what is left to write, check the accounts, and say how it ended."""
        with suppress(GymckptError, TimeoutError):
            limit = (
                self._grace_ends.earliest(LEAVE_S) if self._grace_ends else Deadline.after(session.ports.clock, LEAVE_S)
            )
            async with asyncio.timeout(limit.remaining_s), session.control:
                await session.retirer.clear_now()
        await session.journals.settled()
        await session.write_rows(durable=True)
        counts = await self._accounts(session)
        exit_code = EXIT_RESUMABLE if counts.unresolved else EXIT_SOME_FAILED if counts.failed else EXIT_COMPLETE
        if nothing_to_resume:
            exit_code = EXIT_COMPLETE
        await session.record(
            events.Finished(
                exit_code=exit_code,
                planned=counts.planned,
                succeeded=counts.succeeded,
                failed=counts.failed,
                omitted=counts.omitted,
                unresolved=counts.unresolved,
            )
        )
        metrics = None
        if counts.complete:
            run, plan, journals = session.state, session.opened.plan, session.journals
            metrics = await self._ports.offload.run(lambda: compute(run, plan, (o for o, _ in journals.outcomes())))
            if not nothing_to_resume:
                await self._aggregate(session)
        self._done(session, counts, exit_code)
        return Summary(
            run_id=session.run_id,
            directory=session.opened.paths.root,
            counts=counts,
            exit_code=exit_code,
            attempts=session.state.attempts,
            restored=session.tally.restored,
            elapsed_s=self._ports.clock.monotonic() - self._begun_s,
            last_checkpoint=session.tally.last_checkpoint,
            nothing_to_resume=nothing_to_resume,
            stopped=stopped if counts.unresolved else None,
            metrics=metrics,
        )

    async def _aggregate(self, session: Session) -> None:
        """Let the servers say what they make of all results; given up as soon as somebody asks to stop."""
        asking = aggregate(session.opened, self._servers, self._ports)
        with suppress(StoppedResumable):
            for note in await self._unless_stopped(asking, "before the servers had said what they make of the results"):
                self._on_event({"event": "note", "text": note})

    async def _accounts(self, session: Session) -> Counts:
        """The four sets, each counted on its own from ids; they must add up to what was planned."""
        run, plan = session.state, session.opened.plan
        unresolved = await self._ports.offload.run(lambda: count_unfinished(plan, run))
        counts = run.recount()
        total = counts.succeeded + counts.failed + counts.omitted + unresolved
        if counts != run.counts or total != counts.planned or unresolved != counts.unresolved:
            raise GymckptError(
                f"the accounts do not add up: {counts} by outcomes, {run.counts} as counted on the way, "
                f"{unresolved} planned rollouts without one"
            )
        return counts

    async def _leave_after(self, session: Session, error: GymckptError) -> None:
        """The end of a run that an error stops: rows that are durable in the journal reach their files if they can."""
        if not isinstance(error, NotAsAsked):
            with suppress(GymckptError, OSError):
                await session.write_rows(durable=False)
        self._done(session, session.state.counts, error.exit_code)

    def _done(self, session: Session, counts: Counts, exit_code: int) -> None:
        self._on_event(
            {
                "event": "done",
                "run_id": session.run_id,
                "planned": counts.planned,
                "succeeded": counts.succeeded,
                "failed": counts.failed,
                "omitted": counts.omitted,
                "unresolved": counts.unresolved,
                "exit_code": exit_code,
            }
        )

    async def _unless_stopped(self, work: Coroutine[Any, Any, T], when: str) -> T:
        """Await `work`, or raise `StoppedResumable` as soon as somebody asks to stop."""
        working = asyncio.create_task(work)
        asked = asyncio.create_task(self._wishes.stop.wait())
        try:
            await asyncio.wait([working, asked], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        finally:
            asked.cancel()
            working.cancel()
            await asyncio.wait([working, asked])
        if not working.cancelled() and working.exception() is None:
            return working.result()
        exists = await self._ports.offload.run(lambda: durable.exists(self._ports.fs, RunPaths(self._root).run_json))
        hint = f"go on with: gymckpt restore {self._root}" if exists else "give the same collect command again"
        raise StoppedResumable(f"stopped {when}", hint=hint)


def path_map(pairs: dict[str, str]) -> PathMap:
    """`LOCAL=REMOTE` pairs, or `INSTANCE:LOCAL=REMOTE` for one server."""
    mappings = []
    for local, remote in pairs.items():
        server, colon, path = local.partition(":")
        named = bool(colon) and "/" not in server
        mappings.append(PathMapping(PurePath(path if named else local), PurePath(remote), server if named else None))
    return PathMap(tuple(mappings))
