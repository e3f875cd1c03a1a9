"""What a running collection looks like: redrawn in place on a terminal, a line now and then everywhere else."""

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gymckpt.collection.progress import Progress
from gymckpt.report import lines
from gymckpt.report.words import count, duration, visible

REDRAW_EVERY_S = 0.5
LINE_EVERY_S = 10.0


class Display(Protocol):
    """Shows a collection; a context manager. Both calls are cheap and never raise for a closed stream."""

    every_s: float
    """How often a new snapshot is of use."""

    def update(self, progress: Progress) -> None:
        """Show a snapshot."""
        ...

    def event(self, event: Mapping[str, Any]) -> None:
        """Tell what happened."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SilentDisplay:
    """Shows nothing: with `--json` the events on stdout are all there is."""

    every_s = LINE_EVERY_S

    def update(self, progress: Progress) -> None: ...

    def event(self, event: Mapping[str, Any]) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PlainDisplay(SilentDisplay):
    """One line every few seconds, and one for each event; fit for a log file and for a job's output."""

    def __init__(self, write: Callable[[str], None], wall_s: Callable[[], float] = time.time) -> None:
        self._write = write
        self._wall_s = wall_s

    def update(self, progress: Progress) -> None:
        self._write(visible(lines.plain_line(progress, self._wall_s())))

    def event(self, event: Mapping[str, Any]) -> None:
        for line in lines.event_lines(event):
            self._write(visible(line))


class LiveDisplay(SilentDisplay):
    """A few lines at the bottom of the terminal, redrawn in place; events scroll above them."""

    every_s = REDRAW_EVERY_S

    def __init__(self, console: Console, wall_s: Callable[[], float] = time.time) -> None:
        self._console = console
        self._wall_s = wall_s
        # No thread of its own: it is drawn when there is something new.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def update(self, progress: Progress) -> None:
        self._live.update(render(progress, self._wall_s()))
        if self._live.is_started:
            self._live.refresh()
        else:
            self._live.start(refresh=True)

    def event(self, event: Mapping[str, Any]) -> None:
        for line in lines.event_lines(event):
            self._console.print(Text(visible(line), overflow="fold"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def render(progress: Progress, now_s: float) -> RenderableType:
    """The live display for one snapshot; every line is cut at the width of the terminal."""
    planned = progress.counts.planned
    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        ProgressBar(total=max(planned, 1), completed=lines.finished(progress)),
        f"{count(lines.finished(progress))}/{count(planned)} {lines.percent(progress):.0f} %",
    )
    told = [
        f"run {progress.run_id[:8]} in {progress.directory}{lines.DOT}{duration(progress.elapsed_s)}"
        f"{lines.DOT}{lines.pace(progress)}",
        lines.outcomes(progress),
        lines.flights(progress),
        lines.checkpoint(progress, now_s),
        lines.slowest(progress),
        *(f"waiting: {reason}" for reason in progress.paused),
    ]
    return Group(bar, *(Text(visible(line), no_wrap=True, overflow="ellipsis") for line in told if line))
