"""Materialises the plan: every planned rollout, checked and routed, before the first request.

Rows stream: memory holds one frame, and eight to forty bytes a task where order or repeated ids must be known.
"""

import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

from gymckpt import jsoncodec
from gymckpt.collection.inputs import Lines, TaskInput
from gymckpt.collection.planfile import PlanSummary, PlanWriter, plan_line
from gymckpt.collection.routing import Routing
from gymckpt.collection.rows import PAIRWISE, BadRow, TaskRow, check_depth, is_comparative, read_row, with_repeat
from gymckpt.collection.settings import CollectSettings
from gymckpt.errors import StoppedResumable, UsageError
from gymckpt.identity import TaskId
from gymckpt.ports import FileSystem, WriteHandle

SHOWN_PROBLEMS = 50
MAX_ROLLOUTS = 100_000_000
"""Of one run: what is remembered of each takes some bytes for as long as the run lasts."""
_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What planning found out, beside the file."""

    summary: PlanSummary
    input_sha256: str
    owners: tuple[str, ...]
    largest_cohort: int


@dataclass
class _Ids:
    """Explicit ids by 64-bit digest, in buckets, so that a million of them cost sixteen bytes each."""

    digests: list["array[int]"] = field(default_factory=lambda: [array("Q") for _ in range(_BUCKETS)])
    lines: list["array[int]"] = field(default_factory=lambda: [array("Q") for _ in range(_BUCKETS)])

    def add(self, task: TaskId, line: int) -> None:
        name = jsoncodec.dumps([task.taskset, task.task_id])
        digest = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
        self.digests[digest % _BUCKETS].append(digest)
        self.lines[digest % _BUCKETS].append(line)

    def repeated(self) -> Iterator[tuple[int, int]]:
        """(first line, line that repeats its id)."""
        for digests, lines in zip(self.digests, self.lines, strict=True):
            seen: dict[int, int] = {}
            for digest, line in zip(digests, lines, strict=True):
                if seen.setdefault(digest, line) != line:
                    yield seen[digest], line


@dataclass
class _Problems:
    """Everything wrong with the input, for one message."""

    found: list[tuple[int, str]] = field(default_factory=list)
    count: int = 0

    def add(self, line: int, reason: str) -> None:
        self.count += 1
        if len(self.found) < SHOWN_PROBLEMS:
            self.found.append((line, reason))

    def check(self, name: str) -> None:
        """Raise `UsageError` if there is any."""
        if not self.count:
            return
        shown = [f"  line {line}: {reason}" for line, reason in sorted(self.found)]
        more = [f"  and {self.count - len(self.found)} more"] if self.count > len(self.found) else []
        rows = f"{self.count} bad row{'s' if self.count > 1 else ''}"
        raise UsageError("\n".join([f"{name}: {rows}, nothing was sent", *shown, *more]))


DEEP = 200
"""With so many brackets a row may be too deep to be sent."""


class _Planner:
    def __init__(self, settings: CollectSettings, routing: Routing, writer: PlanWriter) -> None:
        self.settings = settings
        self.routing = routing
        self.writer = writer
        self.owners: set[str] = set()
        self._unused = set(settings.repeats) - {"*"}
        self.cohorts: dict[str, int] = {}
        self.overrides = settings.sampling.overrides()

    def read(self, line: bytes) -> TaskRow:
        found = read_row(line, self.routing, cohort=self.settings.cohort, overrides=self.overrides)
        if line.count(b"[") + line.count(b"{") > DEEP:
            check_depth(found.row)
        self._unused -= {found.agent, found.owner}
        return found

    def check_repeats(self) -> None:
        """Raise `UsageError` if `repeats` names what no row goes to: it would be ignored."""
        if self._unused:
            raise UsageError(
                f"repeats for {', '.join(sorted(self._unused))}: no row goes to an agent or server of that name",
                hint="NAME=N takes the names in the rows' agent_ref, or of --url; N alone is for all",
            )

    def repeats(self, found: TaskRow) -> int:
        repeats = self.settings.repeats
        for name in (found.agent, found.owner, "*"):
            if name is not None and name in repeats:
                return repeats[name]
        return 1

    def add(self, task: int, found: TaskRow) -> None:
        repeats = self.repeats(found)
        self.owners.add(found.owner)
        if found.cohort is not None:
            self.cohorts[found.cohort] = self.cohorts.get(found.cohort, 0) + repeats
        first = jsoncodec.dumps(found.row)
        lines = []
        if self.writer.rollouts + repeats > MAX_ROLLOUTS:
            raise UsageError(f"more than {MAX_ROLLOUTS} rollouts in one run", hint="split the tasks, or repeat less")
        for repeat in range(repeats):
            row = with_repeat(found.row, repeat)
            text = first if row is found.row else jsoncodec.dumps(row)
            lines.append(plan_line(task, repeat, found.owner, found.agent, found.cohort, text))
        self.writer.add_task(task, lines)


def write_plan(
    fs: FileSystem,
    path: PurePath,
    source: TaskInput,
    settings: CollectSettings,
    routing: Routing,
    stopped: Callable[[], bool] = lambda: False,
) -> Plan:
    """Write the plan to the new file `path` and sync it. Blocking: for `Offload`.

    Raises `UsageError` naming every bad row with its line, `StoppedResumable` once `stopped()`.
    """
    handle = fs.create(path)
    try:
        planner = _Planner(settings, routing, PlanWriter(handle))
        lines = Lines(_watched(source.open(), stopped))
        compared = routing.any_named(is_comparative) or PAIRWISE in routing.routes or source.name == f"@{PAIRWISE}"
        reorder = settings.shuffle or settings.cohort is not None or compared
        problems, ids = _Problems(), _Ids()
        good = _checked(lines, planner, problems, ids)
        if reorder:
            _spooled(fs, path.with_name(path.name + ".spool"), good, planner)
        else:
            for task, _, found in good:
                if settings.limit is None or task < settings.limit:
                    planner.add(task, found)
        for first, again in ids.repeated():
            problems.add(again, f"the same task_id as line {first}")
        problems.check(source.name)
        planner.check_repeats()
        if not planner.writer.rollouts:
            raise UsageError(f"{source.name}: no task rows")
        summary = planner.writer.finish(lines.rows)
        handle.fsync()
    finally:
        handle.close()
    return Plan(summary, lines.sha256, tuple(sorted(planner.owners)), max(planner.cohorts.values(), default=1))


def _watched(chunks: Iterable[bytes], stopped: Callable[[], bool]) -> Iterator[bytes]:
    for chunk in chunks:
        if stopped():
            raise StoppedResumable("stopped while the plan was being written")
        yield chunk


def _checked(lines: Lines, planner: _Planner, problems: _Problems, ids: _Ids) -> Iterator[tuple[int, bytes, TaskRow]]:
    """(task index, line, row) of every good row; the bad ones go to `problems`."""
    for number, line in lines:
        try:
            found = planner.read(line)
        except BadRow as problem:
            problems.add(number, str(problem))
            continue
        if found.task is not None:
            ids.add(found.task, number)
        if not problems.count:
            yield lines.rows - 1, line, found


def _spooled(fs: FileSystem, spool: PurePath, good: Iterator[tuple[int, bytes, TaskRow]], planner: _Planner) -> None:
    """Plan the rows in another order than the file's: they wait on disk, only their places in memory."""
    handle: WriteHandle = fs.create(spool)
    try:
        offsets, tasks, groups = array("Q", [0]), array("Q"), array("Q")
        numbers: dict[str, int] = {}
        for task, line, found in good:
            handle.write(line)
            offsets.append(offsets[-1] + len(line))
            tasks.append(task)
            groups.append(task if found.cohort is None else numbers.setdefault(found.cohort, task))
        for place in _order(groups, planner.settings):
            line = fs.read(spool, offsets[place], offsets[place + 1] - offsets[place])
            planner.add(tasks[place], planner.read(line))
    finally:
        handle.close()
        fs.unlink(spool)


def _order(groups: "array[int]", settings: CollectSettings) -> Iterable[int]:
    """Places in the order of the plan: members of a cohort side by side, cohorts shuffled as wholes, then the limit.

    A cohort that the limit cuts in two is left out: a part of it would wait for the rest for ever.
    """
    order = sorted(range(len(groups)), key=groups.__getitem__)
    if settings.shuffle:
        names = sorted(set(groups))
        # Keyed by draws of `random()`, the one method whose sequence Python promises to keep.
        draw = random.Random(settings.seed)  # noqa: S311 - an order, not a secret
        rank = {name: draw.random() for name in names}
        order.sort(key=lambda place: rank[groups[place]])
    if settings.limit is None or settings.limit >= len(order):
        return order
    kept, cut = order[: settings.limit], groups[order[settings.limit]]
    while kept and groups[kept[-1]] == cut:
        kept.pop()
    if not kept:
        raise UsageError(f"--limit {settings.limit} is less than the rows of the first cohort")
    return kept
