"""What a command would do, without doing it: rows planned, servers looked at, a resume laid out in steps."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath

from gymckpt import coordination
from gymckpt.collection.candidates import find_candidates
from gymckpt.collection.inputs import TaskInput
from gymckpt.collection.opening import Ports, with_kinds
from gymckpt.collection.plan import write_plan
from gymckpt.collection.preflight import preflight
from gymckpt.collection.reading import look
from gymckpt.collection.recovery import Step, plan_recovery
from gymckpt.collection.routing import Routing, Server
from gymckpt.collection.run import Counts, Run
from gymckpt.collection.rundirectory import RunPaths, RunRecord
from gymckpt.collection.settings import CollectSettings
from gymckpt.coordination import Deployment, PathMap
from gymckpt.ports import Deadline
from gymckpt.storage.checkpoints import CheckpointDirectory
from gymckpt.storage.durable import exists, make_directories, remove_quietly


@dataclass(frozen=True, slots=True)
class DryRun:
    """What would happen."""

    counts: Counts
    said: tuple[str, ...]
    run_id: str = ""


async def finished(ports: Ports, root: PurePath) -> DryRun | None:
    """What is to be said of a run that is complete: no server is needed for that. None for any other directory."""
    paths = RunPaths(root)
    if await ports.offload.run(lambda: exists(ports.fs, paths.run_json)) is None:
        return None
    record, run = await _replayed(ports, paths)
    if run.counts.unresolved:
        return None
    return DryRun(run.counts, ("nothing to resume",), record.run_id)


async def try_out(
    settings: CollectSettings,
    ports: Ports,
    root: PurePath,
    servers: Sequence[Server],
    deployment: Deployment,
    path_map: PathMap,
    source: TaskInput | None,
) -> DryRun:
    """Check everything. `source` is None for a restore. Leaves nothing behind; raises what the real thing would."""
    paths = RunPaths(root)
    is_run = await ports.offload.run(lambda: exists(ports.fs, paths.run_json)) is not None
    made = await ports.offload.run(lambda: exists(ports.fs, root)) is None
    await ports.offload.run(lambda: make_directories(ports.fs, root))
    try:
        looked = await preflight(
            servers,
            deployment,
            ports.control,
            settings.token(),
            ports.clock,
            ports.fs,
            ports.offload,
            root,
            path_map,
            checkpoints=str(settings.checkpoint_every) != "off",
            timeout_s=settings.control_timeout,
        )
        if is_run:
            tried = await _resume(settings, ports, paths, deployment)
        else:
            assert source is not None
            tried = await _begin(settings, ports, paths, with_kinds(servers, deployment), source)
        said = tuple(finding.text for finding in looked.findings)
        return DryRun(tried.counts, (*said, *tried.said), tried.run_id)
    finally:
        if made:
            with suppress(OSError):
                await ports.offload.run(lambda: ports.fs.remove_directory(root))


async def _begin(
    settings: CollectSettings, ports: Ports, paths: RunPaths, servers: tuple[Server, ...], source: TaskInput
) -> DryRun:
    path = paths.root / ".dry-run.tmp"
    routing = Routing(servers, settings.routes, settings.agent)
    try:
        plan = await ports.offload.run(lambda: write_plan(ports.fs, path, source, settings, routing))
    finally:
        await ports.offload.run(lambda: remove_quietly(ports.fs, path))
    rollouts = plan.summary.rollouts
    said = f"{rollouts} rollouts of {plan.summary.rows} rows would go to {', '.join(plan.owners)}"
    return DryRun(Counts(rollouts, 0, 0, 0, rollouts), (said,))


async def _replayed(ports: Ports, paths: RunPaths) -> tuple[RunRecord, Run]:
    view = await look(ports.fs, ports.offload, ports.clock, paths)
    return view.record, view.run


async def _resume(settings: CollectSettings, ports: Ports, paths: RunPaths, deployment: Deployment) -> DryRun:
    record, run = await _replayed(ports, paths)
    directory = CheckpointDirectory(ports.fs, ports.offload, paths.checkpoints)
    candidates, problems = await find_candidates(directory, record.run_id)
    limit = Deadline.after(ports.clock, settings.control_timeout)
    answers = await coordination.statuses(deployment, ports.control, settings.token(), limit)
    plan = plan_recovery(run.history(), deployment, answers.require(), candidates, start_over=settings.start_over)
    continued = len(plan.restored)
    never = run.counts.unresolved - len(plan.starts)
    said = [f"passed over: {problem}" for problem in problems]
    said += [f"step {number}: {_step(step)}" for number, step in plan.numbered()]
    said += plan.notes
    said.append(
        f"{run.counts.unresolved} of {run.counts.planned} rollouts are left: {continued} would continue"
        + (f" from {plan.checkpoint_id}" if plan.checkpoint_id else "")
        + f", {len(plan.starts) - continued} would start over, {never} were never sent"
    )
    return DryRun(run.counts, tuple(said), record.run_id)


def _step(step: Step) -> str:
    name = type(step).__name__.lower()
    for what in ("checkpoint_id", "episodes", "checkpoint_ids"):
        value = getattr(step, what, None)
        if value is not None:
            return f"{name} {value if isinstance(value, str) else len(value)}"
    return name
