"""The planned rollouts that have no outcome yet, streamed from the plan, a frame at a time."""

from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass

from gymckpt.collection.planfile import Frame, Planned, PlanReader
from gymckpt.collection.run import Run
from gymckpt.ports import Offload


@dataclass(frozen=True, slots=True)
class Batch:
    """What is admitted at once: one rollout, or all unfinished members of a cohort."""

    members: tuple[Planned, ...]
    cohort: str | None = None
    ended: tuple[tuple[int, int], ...] = ()
    """(task, repeat) of the cohort's members that have an outcome."""


async def unfinished(plan: PlanReader, run: Run, offload: Offload) -> AsyncIterator[Batch]:
    """Every rollout without an outcome, in the order of the plan. A frame whose rollouts are all finished is not read;
    rows of finished rollouts are not decoded."""
    for frame in plan.frames:
        if _all_finished(frame, run):
            continue
        for planned in await offload.run(_reading(plan, frame, lambda task, repeat: not run.finished(task, repeat))):
            if not run.finished(planned.task, planned.repeat):
                yield Batch((planned,))


async def unfinished_cohorts(plan: PlanReader, run: Run, offload: Offload) -> AsyncIterator[Batch]:
    """As `unfinished`, for a plan with cohorts: their members stand side by side, and come together."""
    group: list[Planned] = []
    for frame in plan.frames:
        for planned in await offload.run(_reading(plan, frame, lambda task, repeat: True)):
            if group and (planned.cohort is None or planned.cohort != group[0].cohort):
                if batch := _batch(group, run):
                    yield batch
                group = []
            group.append(planned)
    if group and (batch := _batch(group, run)):
        yield batch


def _batch(group: list[Planned], run: Run) -> Batch | None:
    members = tuple(planned for planned in group if not run.finished(planned.task, planned.repeat))
    ended = tuple((planned.task, planned.repeat) for planned in group if run.finished(planned.task, planned.repeat))
    return Batch(members, group[0].cohort, ended) if members else None


def count_unfinished(plan: PlanReader, run: Run) -> int:
    """How many planned rollouts have no outcome, counted from the plan's own ids. Blocking."""
    count = 0
    for frame in plan.frames:
        if not _all_finished(frame, run):
            count += sum(1 for _ in plan.read_frame(frame, lambda task, repeat: not run.finished(task, repeat)))
    return count


def _all_finished(frame: Frame, run: Run) -> bool:
    return frame.tasks is not None and run.finished_in(*frame.tasks) == frame.lines


def _reading(plan: PlanReader, frame: Frame, wanted: Callable[[int, int], bool]) -> Callable[[], list[Planned]]:
    return lambda: list(plan.read_frame(frame, wanted))


async def find(plan: PlanReader, places: Collection[tuple[int, int]], offload: Offload) -> AsyncIterator[Planned]:
    """The planned rollouts at these (task, repeat), in the order of the plan."""
    for frame in plan.frames:
        if frame.tasks is not None and not any(frame.tasks[0] <= task <= frame.tasks[1] for task, _ in places):
            continue
        for planned in await offload.run(_reading(plan, frame, lambda task, repeat: (task, repeat) in places)):
            yield planned
