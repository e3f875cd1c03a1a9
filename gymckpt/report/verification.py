"""`gymckpt verify`: every byte of a run read again, what is damaged or lost, and what can still be restored."""

from collections import deque
from pathlib import PurePath

from gymckpt.collection.candidates import find_lost
from gymckpt.collection.journals import Journals
from gymckpt.collection.planfile import PlanReader
from gymckpt.collection.reading import RunView, look
from gymckpt.collection.resultcheck import ResultCheck
from gymckpt.collection.rundirectory import RunPaths, read_run
from gymckpt.errors import DamagedState, StorageUnavailable
from gymckpt.ports import FileSystem, Offload, SystemClock
from gymckpt.report.documents import ProblemView, VerifiedCheckpoint, VerifyDocument
from gymckpt.report.episodes import open_participant, participants
from gymckpt.report.inspection import Target
from gymckpt.storage.checkpoints import CheckpointDirectory, Listed
from gymckpt.storage.problems import Problem


async def verify(fs: FileSystem, offload: Offload, target: Target, *, quick: bool = False) -> VerifyDocument:
    """Check what `target` names; damage is part of the document, never raised. `quick`: structure, sizes and indexes
    only, no record, no row of a result."""
    if target.paths is None:
        assert target.checkpoint is not None
        return await _verify_alone(fs, offload, target.checkpoint, quick=quick)
    run = _RunCheck(fs, offload, target.paths, quick=quick)
    await run.check()
    checked, restorable = await run.checkpoints(target.checkpoint.name if target.checkpoint else None)
    problems = [_view(target.paths.root, problem) for problem in (*run.problems, *run.in_results)]
    return VerifyDocument(checkpoints=checked, restorable=restorable if not run.problems else None, problems=problems)


class _RunCheck:
    """The check of one run: what is around its checkpoints, then these."""

    def __init__(self, fs: FileSystem, offload: Offload, paths: RunPaths, *, quick: bool) -> None:
        self._fs = fs
        self._offload = offload
        self._paths = paths
        self._quick = quick
        self._run_id: str | None = None
        self._view: RunView | None = None
        self.problems: list[Problem] = []
        """Without run.json, the plan and the journals there is nothing to restore."""
        self.in_results: list[Problem] = []

    async def check(self) -> None:
        """run.json, the plan, the journals and the result files."""
        fs, offload, paths = self._fs, self._offload, self._paths
        try:
            record = await offload.run(lambda: read_run(fs, paths))
            self._run_id = record.run_id
            plan = await offload.run(lambda: PlanReader(fs, paths.plan, record.plan))
            if not self._quick:
                await offload.run(lambda: _read_plan(plan))
        except (DamagedState, StorageUnavailable) as error:
            self.problems.append(Problem.of(error))
        try:
            if not self._quick:
                await Journals(fs, offload, SystemClock(), paths.journal).verify()
            if self._run_id is not None:
                results = await offload.run(lambda: ResultCheck(fs, paths))
                view = self._view = await look(fs, offload, SystemClock(), paths)
                if not self._quick:
                    self.in_results = await results.compare(offload, view.journals, view.written, view.run.opening)
        except (DamagedState, StorageUnavailable) as error:
            self.problems.append(Problem.of(error))

    async def checkpoints(self, only: str | None) -> tuple[list[VerifiedCheckpoint], str | None]:
        """Those that are there and those that should be, and the one that a restore would use."""
        directory = CheckpointDirectory(self._fs, self._offload, self._paths.checkpoints)
        try:
            lost = {} if self._view is None else await find_lost(directory, self._view.run)
            listing = await directory.listing()
        except (DamagedState, StorageUnavailable) as error:
            self.problems.append(Problem.of(error))
            return [], None
        checked: list[VerifiedCheckpoint] = []
        restorable: str | None = None
        for listed in listing:
            name = listed.checkpoint_id
            if only not in (None, name) or name in lost or (listed.state == "unpublished" and only is None):
                continue
            found = await _verify_listed(directory, listed, quick=self._quick)
            if listed.published is not None and listed.published.collection.run_id != self._run_id:
                if self._run_id is not None:
                    other = listed.published.collection.run_id
                    found = [Problem(f"{listed.published.path} is of run {other}: this run never uses it"), *found]
            elif not found:
                restorable = name
            checked.append(_checked(self._paths.root, name, found))
        gone = {name: problem for name, problem in lost.items() if only in (None, name)}
        checked += [_checked(self._paths.root, name, [problem]) for name, problem in gone.items()]
        return checked, restorable


async def _verify_listed(directory: CheckpointDirectory, listed: Listed, *, quick: bool) -> list[Problem]:
    if listed.published is not None:
        return await directory.verify(listed.published, quick=quick)
    if listed.problem is not None:
        return [listed.problem]
    return [Problem(f"{directory.path(listed.checkpoint_id)} was never published")]


def _read_plan(plan: PlanReader) -> None:
    """Every frame is decompressed and its lines are counted; raises `DamagedState`."""
    for frame in plan.frames:
        deque(plan.read_frame(frame, lambda task, repeat: False), maxlen=0)


async def _verify_alone(fs: FileSystem, offload: Offload, path: PurePath, *, quick: bool) -> VerifyDocument:
    """A checkpoint without its run: it can be whole, it can continue nothing."""
    directory = CheckpointDirectory(fs, offload, path.parent)
    listed = next((entry for entry in await directory.listing() if entry.checkpoint_id == path.name), None)
    if listed is not None and listed.state != "unpublished":
        found = await _verify_listed(directory, listed, quick=quick)
    else:
        found = await _verify_parts(fs, offload, path, quick=quick)
    return VerifyDocument(checkpoints=[_checked(path.parent, path.name, found)], restorable=None)


async def _verify_parts(fs: FileSystem, offload: Offload, path: PurePath, *, quick: bool) -> list[Problem]:
    found: list[Problem] = []
    try:
        parts = await offload.run(lambda: participants(fs, path))
    except (DamagedState, StorageUnavailable) as error:
        return [Problem.of(error)]
    for kind, instance in parts:
        try:
            reader = await open_participant(fs, offload, path, kind, instance)
            found += await reader.verify(quick=quick)
        except (DamagedState, StorageUnavailable) as error:
            found.append(Problem.of(error))
    return found


def _checked(root: PurePath, checkpoint_id: str, found: list[Problem]) -> VerifiedCheckpoint:
    problems = [_view(root, problem) for problem in found]
    return VerifiedCheckpoint(checkpoint_id=checkpoint_id, valid=not problems, problems=problems)


def _view(root: PurePath, problem: Problem) -> ProblemView:
    """A problem's message names the file that it is about, by a path that begins with the run's directory."""
    what = problem.what.replace(f"{root}/", "")
    _, _, named = problem.what.partition(f"{root}/")
    return ProblemView(
        file=(named or what).split(" ")[0].rstrip(":"),
        what=what,
        episodes=[episode.capture_key for episode in problem.episodes],
        unreadable=problem.unreadable,
    )
