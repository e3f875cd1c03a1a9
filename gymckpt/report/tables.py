"""Documents as tables for people. What comes from elsewhere is `plain`, whoever prints it."""

import time
from collections.abc import Iterable, Mapping
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gymckpt.report.documents import (
    CheckpointView,
    EpisodeView,
    EstimateView,
    InspectDocument,
    ReportDocument,
    ScoresView,
    ServerView,
    TaskView,
    VerifyDocument,
)
from gymckpt.report.words import count, duration, size, visible

COPIED = frozenset({"checkpoint", "rollout", "boundary"})
WIDE = 116
NARROW = 80
"""Columns of a terminal from which all facts of an episode fit a line, and from which all but who keeps it do."""


def plain(text: str, style: str = "") -> Text:
    """`text`, whoever wrote it: no markup, no control characters."""
    return Text(visible(text), style=style)


def plain_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A table without a box, fit for a terminal and for a pipe; columns in `right` are aligned to the right. Where room
    is short, names that people copy are the last to be broken."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    to_the_right = set(right)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in to_the_right else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column in COPIED)
    return table


def servers_table(servers: Iterable[ServerView], now_s: float | None = None) -> Table:
    """The status of each server."""
    now_s = time.time() if now_s is None else now_s
    table = plain_table("server", "kind", "phase", "lease", "in flight", "blockers", "restarts", "url", right=["lease"])
    for server in servers:
        if server.problem is not None:
            table.add_row(
                server.instance, server.kind or "-", plain(server.problem, style="red"), "", "", "", "", server.url
            )
            continue
        lease = "-" if server.lease_expires_at is None else duration(server.lease_expires_at - now_s)
        counts = " ".join(f"{name} {count}" for name, count in server.in_flight.items() if count) or "-"
        blockers = plain(", ".join(server.blockers[:3]) or "-")
        if server.blocker_count > 3:
            blockers.append(f" (+{server.blocker_count - 3})")
        table.add_row(
            server.instance,
            server.kind or "no participant",
            server.phase or "-",
            lease,
            counts,
            blockers,
            str(server.restarts),
            server.url,
        )
    return table


def inspect_tables(document: InspectDocument, now_s: float | None = None, *, width: int = WIDE) -> RenderableType:
    """Counts, checkpoints, and the episodes of the chosen one; fewer facts of each where `width` has no room."""
    now_s = time.time() if now_s is None else now_s
    parts: list[RenderableType] = []
    if document.planned is not None:
        parts.append(plain(f"run {document.run_id}", style="bold"))
        parts.append(
            plain(
                f"planned {count(document.planned)}: succeeded {count(document.succeeded or 0)}, "
                f"failed {count(document.failed or 0)}, omitted {count(document.omitted or 0)}, "
                f"unresolved {count(document.unresolved or 0)}"
            )
        )
        parts.append(Text(""))
    parts.append(_checkpoints(document.checkpoints, now_s) if document.checkpoints else plain("no checkpoint yet"))
    if document.checkpoint_id is not None:
        chosen = next(view for view in document.checkpoints if view.checkpoint_id == document.checkpoint_id)
        parts += [Text(""), plain(f"episodes of {document.checkpoint_id}", style="bold")]
        parts.append(_episodes(document.episodes, now_s, width))
        if document.truncated:
            whole = count(chosen.episodes + chosen.restarts)
            parts.append(plain(f"the first {count(len(document.episodes))} of {whole}; --limit N shows more"))
    return Group(*parts)


def _checkpoints(views: Iterable[CheckpointView], now_s: float) -> Table:
    table = plain_table(
        "checkpoint", "age", "episodes", "restarts", "size", "", right=["age", "episodes", "restarts", "size"]
    )
    for view in views:
        state = plain(f"named {view.name}") if view.name else ""
        table.add_row(
            view.checkpoint_id,
            _age(view.created_at, now_s),
            count(view.episodes),
            count(view.restarts),
            size(view.bytes),
            state if view.valid else plain("damaged: gymckpt verify says where", style="red"),
        )
    return table


def _episodes(views: Iterable[EpisodeView], now_s: float, width: int) -> Table:
    left_out = {"age", "turns", "size", "kept by"} if width < NARROW else {"kept by"} if width < WIDE else set[str]()
    columns = ("rollout", "attempt", "boundary", "age", "turns", "size", "kept by", "after a crash")
    shown = [column for column in columns if column not in left_out]
    table = plain_table(*shown, right=["attempt", "age", "turns", "size"])
    for view in views:
        facts: dict[str, str | Text] = {
            "rollout": view.rollout_id,
            "attempt": str(view.attempt),
            "boundary": plain(str(view.boundary)) if view.boundary else "-",
            "age": _age(view.boundary.at, now_s) if view.boundary else "-",
            "turns": str(view.turns),
            "size": size(view.bytes),
            "kept by": " ".join(view.kinds) or "-",
            "after a crash": plain(f"starts over: {view.restart}") if view.restart else "continues",
        }
        table.add_row(*(facts[column] for column in shown))
    return table


def _age(at_s: float, now_s: float) -> str:
    return duration(max(0.0, now_s - at_s)) if at_s else "-"


def verify_table(document: VerifyDocument) -> RenderableType:
    """What is damaged, and what can still be restored."""
    parts: list[RenderableType] = [
        plain(f"{'unreadable now' if problem.unreadable else 'damaged'}: {problem.what}", style="red")
        for problem in document.problems
    ]
    for checkpoint in document.checkpoints:
        unreadable = bool(checkpoint.problems) and all(problem.unreadable for problem in checkpoint.problems)
        state = "whole" if checkpoint.valid else "unreadable now" if unreadable else "damaged"
        parts.append(plain(f"{checkpoint.checkpoint_id}: {state}"))
        for problem in checkpoint.problems:
            lost = f" (episodes: {', '.join(problem.episodes[:10])})" if problem.episodes else ""
            parts.append(plain(f"  {problem.what}{lost}", style="red"))
    if document.restorable:
        parts.append(plain(f"a restore would use {document.restorable}"))
    elif not any(checkpoint.valid for checkpoint in document.checkpoints):
        parts.append(plain("there is no checkpoint to restore"))
    elif document.problems:
        parts.append(plain("a restore refuses: what is damaged is outside the checkpoints"))
    else:
        parts.append(plain("no run here has these checkpoints: a restore takes the directory of their run"))
    return Group(*parts)


def report_tables(document: ReportDocument) -> RenderableType:
    """Accounts, scores whole and by agent, failures by kind, and the tasks if asked for."""
    counts = document.counts
    parts: list[RenderableType] = [
        plain(f"run {document.run_id}", style="bold"),
        plain(
            f"planned {count(counts.planned)}: succeeded {count(counts.succeeded)}, failed {count(counts.failed)}, "
            f"omitted {count(counts.omitted)}, unresolved {count(counts.unresolved)}"
        ),
        plain(f"attempts {count(document.attempts)} (attempts are not samples)"),
        Text(""),
        _scores({"all": document.whole, **document.by_agent}),
    ]
    if document.failures:
        parts += [Text(""), _failures(document.failures)]
    if document.tasks:
        parts += [Text(""), _tasks(document.tasks)]
    return Group(*parts)


def _scores(scores: Mapping[str, ScoresView]) -> Table:
    """Two lines each: over the samples that there are, and over everything planned."""
    widths = sorted({int(k) for view in scores.values() for k in (*view.pass_at, *view.pass_at_planned)})
    numbers = ["tasks", "rollouts", "mean", "95 % interval", *(f"pass@{k}" for k in widths)]
    table = plain_table("", "of", *numbers, right=numbers)
    for name, view in scores.items():
        lines: tuple[tuple[str, int, EstimateView | None, Mapping[str, float]], ...] = (
            ("samples", view.samples, view.mean_scored, view.pass_at),
            ("planned", view.planned, view.mean_planned, view.pass_at_planned),
        )
        for of, rollouts, mean, passes in lines:
            shown = (f"{passes[str(k)]:.4f}" if str(k) in passes else "-" for k in widths)
            first = plain(name) if of == "samples" else ""
            table.add_row(first, of, count(view.tasks), count(rollouts), *_estimate(mean), *shown)
    return table


def _estimate(estimate: EstimateView | None) -> tuple[str, str]:
    if estimate is None:
        return "-", "-"
    known = estimate.low is not None and estimate.high is not None
    return f"{estimate.value:.4f}", f"{estimate.low:.4f} to {estimate.high:.4f}" if known else "-"


def _failures(failures: Mapping[str, int]) -> Table:
    table = plain_table("failed", "rollouts", right=["rollouts"])
    for kind, number in sorted(failures.items(), key=lambda item: -item[1]):
        table.add_row(plain(kind), count(number))
    return table


def _tasks(tasks: Iterable[TaskView]) -> Table:
    table = plain_table("task", "samples", "passes", "mean", right=["task", "samples", "passes", "mean"])
    for task in tasks:
        table.add_row(str(task.task), count(task.samples), count(task.passes), f"{task.mean:.4f}")
    return table
