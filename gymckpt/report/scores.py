"""The numbers of a run for people and programs: from the journal, over every sample, whoever collected it when."""

from gymckpt.collection.metrics import Estimate, Metrics, Scores, per_task
from gymckpt.collection.planfile import PlanReader
from gymckpt.collection.reading import compute_metrics, look
from gymckpt.collection.run import Counts
from gymckpt.collection.rundirectory import RunPaths
from gymckpt.ports import FileSystem, Offload, SystemClock
from gymckpt.report.documents import CountsView, EstimateView, ReportDocument, ScoresView, TaskView


async def report(fs: FileSystem, offload: Offload, paths: RunPaths, *, tasks: bool) -> ReportDocument:
    """What `gymckpt report` shows; `tasks` adds a line for each task. Reads indexes and the plan, no payload."""
    view = await look(fs, offload, SystemClock(), paths)
    plan = await offload.run(lambda: PlanReader(fs, paths.plan, view.record.plan))
    metrics = await compute_metrics(offload, view, plan)
    listed: list[TaskView] = []
    if tasks:
        listed = await offload.run(
            lambda: [TaskView(**task) for task in per_task(view.run, (event for event, _ in view.journals.outcomes()))]
        )
    return document(view.record.run_id, view.run.counts, metrics, listed)


def document(run_id: str, counts: Counts, metrics: Metrics, tasks: list[TaskView]) -> ReportDocument:
    """Metrics as a document."""
    return ReportDocument(
        run_id=run_id,
        counts=CountsView(
            planned=counts.planned,
            succeeded=counts.succeeded,
            failed=counts.failed,
            omitted=counts.omitted,
            unresolved=counts.unresolved,
        ),
        attempts=metrics.attempts,
        whole=_scores(metrics.whole),
        by_agent={name: _scores(scores) for name, scores in metrics.by_agent.items()},
        failures=dict(metrics.failures),
        tasks=tasks,
    )


def _scores(scores: Scores) -> ScoresView:
    return ScoresView(
        tasks=scores.tasks,
        planned=scores.planned,
        samples=scores.samples,
        mean_scored=_estimate(scores.mean_scored),
        mean_planned=_estimate(scores.mean_planned),
        pass_at={str(k): value for k, value in scores.pass_at.items()},
        pass_at_planned={str(k): value for k, value in scores.pass_at_planned.items()},
    )


def _estimate(estimate: Estimate | None) -> EstimateView | None:
    return None if estimate is None else EstimateView(value=estimate.value, low=estimate.low, high=estimate.high)
