"""What the outcomes say in numbers, from the journal alone: every sample of the run, whoever collected it when.

A sample is a succeeded rollout; attempts are not samples. Two denominators, both told: `scored` averages over samples,
`planned` over everything that was not omitted, with nothing earned where there is no sample.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gymckpt.collection.events import Outcome
from gymckpt.collection.planfile import PlanReader
from gymckpt.collection.run import Run

PASS_REWARD = 1.0
"""A sample passes with at least this reward."""

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % confidence interval (None with fewer than two tasks)."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Scores:
    """Metrics of a set of tasks."""

    tasks: int
    planned: int
    """Rollouts that were planned and not omitted."""
    samples: int
    mean_scored: Estimate | None
    """mean@k: the mean over tasks of each task's mean reward, over its samples."""
    mean_planned: Estimate | None
    pass_at: Mapping[int, float]
    """pass@k by k, the unbiased estimator, over tasks with at least k samples."""
    pass_at_planned: Mapping[int, float]
    """The same, over all tasks, a missing sample counting as one that did not pass."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The run's metrics, whole and by agent (or environment, where rows name no agent)."""

    whole: Scores
    by_agent: Mapping[str, Scores]
    failures: Mapping[str, int]
    """Rollouts that failed, by kind."""
    attempts: int


@dataclass(slots=True)
class _Tasks:
    """Sums for each task: eight bytes a number."""

    rows: int
    rewards: "array[float]" = field(init=False)
    samples: "array[int]" = field(init=False)
    passes: "array[int]" = field(init=False)
    planned: "array[int]" = field(init=False)

    def __post_init__(self) -> None:
        self.rewards = array("d", bytes(8 * self.rows))
        self.samples, self.passes, self.planned = (array("L", bytes(8 * self.rows)) for _ in range(3))


def compute(run: Run, plan: PlanReader, outcomes: Iterable[Outcome]) -> Metrics:
    """Metrics from the outcomes of the journal. Blocking; the plan is read for who ran what."""
    sums = _Tasks(plan.summary.rows)
    agents: dict[str, list[int]] = {}
    for frame in plan.frames:
        for planned in plan.read_frame(frame, lambda task, repeat: True):
            if not sums.planned[planned.task]:
                agents.setdefault(planned.name, []).append(planned.task)
            sums.planned[planned.task] += 1
    failures: dict[str, int] = {}
    seen = bytearray(plan.summary.rows * plan.summary.max_repeats)
    for outcome in outcomes:
        rollout_id = outcome.episode.rollout_id
        task, repeat = run.place(rollout_id)
        index = task * plan.summary.max_repeats + repeat
        if not outcome.final or outcome.opening != run.opening(rollout_id) or seen[index]:
            continue
        seen[index] = 1
        if outcome.outcome == "omitted":
            sums.planned[task] -= 1
        elif outcome.outcome == "failed":
            failures[outcome.kind or "failed"] = failures.get(outcome.kind or "failed", 0) + 1
        elif outcome.reward is not None:
            sums.rewards[task] += outcome.reward
            sums.samples[task] += 1
            sums.passes[task] += outcome.reward >= PASS_REWARD
    everything = _scores(sums, range(plan.summary.rows))
    by_agent = {name: _scores(sums, tasks) for name, tasks in sorted(agents.items())}
    return Metrics(everything, by_agent, failures, run.attempts)


def per_task(run: Run, outcomes: Iterable[Outcome]) -> Iterator[dict[str, Any]]:
    """`{"task", "samples", "mean", "passes"}` of each task with a sample, in the order of the input. Blocking."""
    sums: dict[int, dict[int, float]] = {}
    for outcome in outcomes:
        rollout_id = outcome.episode.rollout_id
        if outcome.final and outcome.reward is not None and outcome.opening == run.opening(rollout_id):
            task, repeat = run.place(rollout_id)
            sums.setdefault(task, {}).setdefault(repeat, outcome.reward)
    for task in sorted(sums):
        rewards = sums[task].values()
        passes = sum(reward >= PASS_REWARD for reward in rewards)
        yield {"task": task, "samples": len(rewards), "mean": math.fsum(rewards) / len(rewards), "passes": passes}


def _scores(sums: _Tasks, tasks: Iterable[int]) -> Scores:
    wanted = [task for task in tasks if sums.planned[task]]
    scored = [task for task in wanted if sums.samples[task]]
    widths = sorted({1, *(1 << bit for bit in range(1, 11)), max((sums.planned[t] for t in wanted), default=1)})
    widest = max((sums.planned[task] for task in wanted), default=0)
    pass_at, pass_planned = {}, {}
    for k in (k for k in widths if k <= widest):
        enough = [pass_at_k(sums.samples[t], sums.passes[t], k) for t in scored if sums.samples[t] >= k]
        if enough:
            pass_at[k] = sum(enough) / len(enough)
        planned = [pass_at_k(sums.planned[t], sums.passes[t], k) for t in wanted if sums.planned[t] >= k]
        pass_planned[k] = sum(planned) / len(planned)
    return Scores(
        tasks=len(wanted),
        planned=sum(sums.planned[task] for task in wanted),
        samples=sum(sums.samples[task] for task in scored),
        mean_scored=estimate([sums.rewards[task] / sums.samples[task] for task in scored]),
        mean_planned=estimate([sums.rewards[task] / sums.planned[task] for task in wanted]),
        pass_at=pass_at,
        pass_at_planned=pass_planned,
    )


def pass_at_k(samples: int, passes: int, k: int) -> float:
    """The chance that at least one of `k` of these samples passes: 1 - C(n - c, k) / C(n, k)."""
    if samples - passes < k:
        return 1.0
    return 1.0 - math.prod((samples - passes - i) / (samples - i) for i in range(k))


def estimate(means: list[float]) -> Estimate | None:
    """The mean of independent task means with its 95 % interval (Student's t); None for none.

    Where every mean lies between 0 and 1, so do the bounds of the interval.
    """
    if not means:
        return None
    count = len(means)
    value = math.fsum(means) / count
    if count < 2:
        return Estimate(value, None, None)
    variance = math.fsum((mean - value) ** 2 for mean in means) / (count - 1)
    width = (_T95[count - 2] if count - 2 < len(_T95) else _t95(count - 1)) * math.sqrt(variance / count)
    low, high = value - width, value + width
    if min(means) >= 0.0 and max(means) <= 1.0:
        low, high = max(0.0, low), min(1.0, high)
    return Estimate(value, low, high)


def _t95(freedom: int) -> float:
    """Student's t for 95 % beyond the table, by its expansion in 1 / freedom."""
    z = _Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
