"""What `collect` and `restore` share: servers, signals, display, and the collector between them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gymckpt import eventloop
from gymckpt.collection import collector, signals
from gymckpt.collection.collector import Summary
from gymckpt.collection.inputs import TaskInput
from gymckpt.collection.opening import Ports
from gymckpt.collection.processes import nobody_tells
from gymckpt.collection.progress import Progress
from gymckpt.collection.routing import Server
from gymckpt.collection.settings import CollectSettings
from gymckpt.errors import StoppedResumable
from gymckpt.ports import ServerRef, SystemClock, ThreadOffload
from gymckpt.report.display import Display, LiveDisplay, PlainDisplay, SilentDisplay
from gymckpt.report.summary import summary_lines
from gymckpt.servers.supervisor import STOP_TIMEOUT_S
from gymckpt.storage.files import LocalFileSystem
from gymckpt.wire.client import HttpTransport

from . import embedded, heads
from .console import is_lively, note, stderr
from .printing import LinePrinter

T = TypeVar("T")

CONTROL_CONNECTIONS = 64
SPARE_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class Job:
    """One start of a collector."""

    settings: CollectSettings
    root: Path
    """Absolute."""
    source: TaskInput | None
    """The rows of `collect`; None for a restore."""
    restore: bool
    needs_servers: bool
    """False for a run that is complete: there is nothing to ask of any server."""
    as_json: bool


def carry_out(job: Job) -> int:
    """Run the collector and give its exit code; raises the errors of the tree."""
    with ExitStack() as stack:
        display: Display = SilentDisplay()
        printer: LinePrinter | None = None
        if job.as_json:
            printer = stack.enter_context(LinePrinter())
        else:
            display = LiveDisplay(stderr()) if is_lively() else PlainDisplay(note)
        stack.enter_context(display)
        told = _Told(display, printer)
        stack.enter_context(_warnings(told.event))
        eventloop.give_memory_back()
        summary = eventloop.run(_collect(job, told))
    if not job.as_json:
        print("\n".join(summary_lines(summary, told.mean_reward)), flush=True)
    elif summary.resume_command is not None:
        note(f"go on with: {summary.resume_command}")
    return summary.exit_code


class _Told:
    """Passes on what the collector says."""

    def __init__(self, display: Display, printer: LinePrinter | None) -> None:
        self.display = display
        self._printer = printer
        self._snapshot: Callable[[], Progress] | None = None
        self.mean_reward: float | None = None

    def event(self, event: Mapping[str, Any]) -> None:
        if self._printer is not None:
            self._printer.print(event)
        self.display.event(event)

    def progress(self, snapshot: Callable[[], Progress]) -> None:
        self._snapshot = snapshot

    async def keep_showing(self) -> None:
        while True:
            await asyncio.sleep(self.display.every_s)
            if self._snapshot is not None:
                self.display.update(self._snapshot())

    def finish(self) -> None:
        if self._snapshot is not None:
            self.mean_reward = self._snapshot().mean_reward


async def _collect(job: Job, told: _Told) -> Summary:
    settings, wishes, clock = job.settings, signals.Wishes(), SystemClock()
    async with AsyncExitStack() as stack:
        stack.enter_context(signals.handled(wishes, settings.grace))
        servers: tuple[Server, ...] = ()
        processes = nobody_tells()
        if job.needs_servers and embedded.wanted(settings):
            starting = stack.enter_async_context(embedded.running(settings, job.root, told.event))
            running = await _unless_stopped(starting, wishes, job)
            servers = running.servers
            settings = settings.model_copy(update={"control_token": running.token, "control_token_file": None})
            wishes.reserved_s = STOP_TIMEOUT_S
        elif job.needs_servers:
            servers = tuple(Server(ServerRef(name, url.rstrip("/"))) for name, url in settings.url.items())
            if settings.gym_head is not None:
                found, processes = await _unless_stopped(heads.servers_of(settings.gym_head), wishes, job)
                servers += found
        connections = settings.concurrency + SPARE_CONNECTIONS
        ports = Ports(
            clock=clock,
            fs=LocalFileSystem(group_readable=settings.group_readable),
            offload=ThreadOffload(),
            data=await stack.enter_async_context(HttpTransport(max_connections=connections)),
            control=await stack.enter_async_context(HttpTransport(max_connections=CONTROL_CONNECTIONS)),
            processes=processes,
        )
        run = collector.restore if job.restore else partial(collector.collect, source=job.source)
        showing = asyncio.create_task(told.keep_showing())
        try:
            return await run(
                settings,
                job.root,
                servers,
                ports,
                on_event=told.event,
                on_progress=told.progress,
                wishes=wishes,
            )
        finally:
            told.finish()
            showing.cancel()


async def _unless_stopped(work: Awaitable[T], wishes: signals.Wishes, job: Job) -> T:
    """Await `work`, or give it up as soon as somebody asks to stop."""
    working = asyncio.ensure_future(work)
    asked = asyncio.create_task(wishes.stop.wait())
    try:
        await asyncio.wait([working, asked], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done() or working.done():
            return working.result()
    finally:
        asked.cancel()
        working.cancel()
        await asyncio.wait([working, asked])
    again = f"go on with: gymckpt restore {job.root}" if job.restore else "give the same collect command again"
    raise StoppedResumable("stopped before the servers were ready", hint=again)


class _warnings(logging.Handler):  # noqa: N801 - used as a context manager
    """Warnings of the package become notes among the events."""

    def __init__(self, tell: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell({"event": "note", "text": record.getMessage()})

    def __enter__(self) -> "_warnings":
        logging.getLogger("gymckpt").addHandler(self)
        logging.getLogger("gymckpt").propagate = False
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("gymckpt").removeHandler(self)
        logging.getLogger("gymckpt").propagate = True
