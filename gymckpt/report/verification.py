"""`gymckpt verify`: every byte of a run read again, what is damaged, and what can still be restored."""

from collections import deque
from pathlib import PurePath

from gymckpt.collection.journals import Journals
from gymckpt.collection.planfile import PlanReader
from gymckpt.collection.rundirectory import RunPaths, read_run
from gymckpt.errors import DamagedState
from gymckpt.ports import FileSystem, Offload, SystemClock
from gymckpt.report.documents import ProblemView, VerifiedCheckpoint, VerifyDocument
from gymckpt.report.episodes import open_participant, participants
from gymckpt.report.inspection import Target, read_counts
from gymckpt.storage.checkpoints import CheckpointDirectory, Listed
from gymckpt.storage.problems import Problem


async def verify(fs: FileSystem, offload: Offload, target: Target) -> VerifyDocument:
    """Check what `target` names; damage is part of the document, never raised."""
    if target.paths is None:
        assert target.checkpoint is not None
        return await _verify_alone(fs, offload, target.checkpoint)
    run_id, problems = await _verify_run(fs, offload, target.paths)
    directory = CheckpointDirectory(fs, offload, target.paths.checkpoints)
    checked: list[VerifiedCheckpoint] = []
    restorable: str | None = None
    for listed in await directory.listing():
        if listed.state == "unpublished":
            continue
        if target.checkpoint is not None and listed.checkpoint_id != target.checkpoint.name:
            continue
        found = await _verify_listed(directory, listed)
        checked.append(_checked(target.paths.root, listed.checkpoint_id, found))
        if not found and listed.published is not None and listed.published.collection.run_id == run_id:
            restorable = listed.checkpoint_id
    return VerifyDocument(checkpoints=checked, restorable=restorable if not problems else None, problems=problems)


async def _verify_listed(directory: CheckpointDirectory, listed: Listed) -> list[Problem]:
    if listed.published is None:
        return [listed.problem] if listed.problem is not None else []
    return await directory.verify(listed.published)


async def _verify_run(fs: FileSystem, offload: Offload, paths: RunPaths) -> tuple[str | None, list[ProblemView]]:
    """run.json, the plan and the journals."""
    problems: list[ProblemView] = []
    run_id: str | None = None
    try:
        record = await offload.run(lambda: read_run(fs, paths))
        run_id = record.run_id
        await offload.run(lambda: _read_plan(PlanReader(fs, paths.plan, record.plan)))
    except DamagedState as error:
        problems.append(_view(paths.root, Problem.of(error)))
    try:
        await Journals(fs, offload, SystemClock(), paths.journal).verify()
        if not problems:
            await read_counts(fs, offload, paths)
    except DamagedState as error:
        problems.append(_view(paths.root, Problem.of(error)))
    return run_id, problems


def _read_plan(plan: PlanReader) -> None:
    """Every frame is decompressed and its lines are counted; raises `DamagedState`."""
    for frame in plan.frames:
        deque(plan.read_frame(frame, lambda task, repeat: False), maxlen=0)


async def _verify_alone(fs: FileSystem, offload: Offload, path: PurePath) -> VerifyDocument:
    """A checkpoint without its run: it can be whole, it can continue nothing."""
    directory = CheckpointDirectory(fs, offload, path.parent)
    listed = next((entry for entry in await directory.listing() if entry.checkpoint_id == path.name), None)
    if listed is not None and listed.state != "unpublished":
        found = await _verify_listed(directory, listed)
    else:
        found = await _verify_parts(fs, offload, path)
    return VerifyDocument(checkpoints=[_checked(path.parent, path.name, found)], restorable=None)


async def _verify_parts(fs: FileSystem, offload: Offload, path: PurePath) -> list[Problem]:
    found: list[Problem] = []
    try:
        parts = await offload.run(lambda: participants(fs, path))
    except DamagedState as error:
        return [Problem.of(error)]
    for kind, instance in parts:
        try:
            reader = await open_participant(fs, offload, path, kind, instance)
            found += await reader.verify()
        except DamagedState as error:
            found.append(Problem.of(error))
    return found


def _checked(root: PurePath, checkpoint_id: str, found: list[Problem]) -> VerifiedCheckpoint:
    problems = [_view(root, problem) for problem in found]
    return VerifiedCheckpoint(checkpoint_id=checkpoint_id, valid=not problems, problems=problems)


def _view(root: PurePath, problem: Problem) -> ProblemView:
    """A problem's message begins with the path of the file that it is about."""
    what = problem.what.removeprefix(f"{root}/")
    return ProblemView(
        file=what.split(" ")[0].rstrip(":"), what=what, episodes=[episode.capture_key for episode in problem.episodes]
    )
