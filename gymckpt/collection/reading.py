"""A run as it stands, for those who only look: nothing is locked, nothing is changed, no payload is read."""

from dataclasses import dataclass

from gymckpt.collection.events import RowsWritten
from gymckpt.collection.journals import Journals
from gymckpt.collection.metrics import Metrics, compute
from gymckpt.collection.opening import new_run, read_journals
from gymckpt.collection.planfile import PlanReader
from gymckpt.collection.run import Run
from gymckpt.collection.rundirectory import RunPaths, RunRecord, read_run
from gymckpt.ports import Clock, FileSystem, Offload


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment. It may go on meanwhile: what is read here was true once."""

    record: RunRecord
    run: Run
    journals: Journals
    written: RowsWritten
    """How far the result files are known to be good."""


async def look(fs: FileSystem, offload: Offload, clock: Clock, paths: RunPaths) -> RunView:
    """Read run.json and replay the journals. Raises `NotAsAsked` where there is no run, `DamagedState` for damage."""
    record = await offload.run(lambda: read_run(fs, paths))
    journals = await read_journals(fs, offload, clock, paths, record.run_id)
    run = new_run(record)
    written = await offload.run(lambda: journals.replay_into(run))
    return RunView(record, run, journals, written)


async def read_metrics(fs: FileSystem, offload: Offload, clock: Clock, paths: RunPaths) -> Metrics:
    """The run's metrics so far, from the journal."""
    view = await look(fs, offload, clock, paths)
    return await compute_metrics(offload, view, await offload.run(lambda: PlanReader(fs, paths.plan, view.record.plan)))


async def compute_metrics(offload: Offload, view: RunView, plan: PlanReader) -> Metrics:
    """The metrics of a run that was looked at."""
    return await offload.run(lambda: compute(view.run, plan, (event for event, _ in view.journals.outcomes())))
