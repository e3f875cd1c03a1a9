"""How a collection ended, for the person who started it."""

from gymckpt.collection.collector import Summary
from gymckpt.report.words import count, duration, size


def summary_lines(summary: Summary, mean_reward: float | None) -> list[str]:
    """The last words of `collect` and `restore`; `mean_reward` is over what this process finished."""
    counts, directory = summary.counts, summary.directory
    if summary.nothing_to_resume:
        return [
            f"nothing to resume: run {summary.run_id} in {directory} is complete",
            _counts(summary),
            *_metrics(summary),
        ]
    if summary.dry_run:
        return [f"dry run: all is in place, nothing was sent; {count(counts.unresolved)} rollouts to do"]
    state = "complete" if counts.complete else summary.stopped or "not complete"
    lines = [f"run {summary.run_id} {state} after {duration(summary.elapsed_s)}", _counts(summary)]
    attempts = f"attempts {count(summary.attempts)} (attempts are not samples)"
    lines.append(attempts + (f", {count(summary.restored)} continued from a checkpoint" if summary.restored else ""))
    lines += _metrics(summary)
    if mean_reward is not None and summary.metrics is None:
        lines.append(f"mean reward of what this process finished: {mean_reward:.4f}")
    if (last := summary.last_checkpoint) is not None:
        lines.append(
            f"last checkpoint {last.checkpoint_id}: {count(last.episodes)} episodes, {count(last.restarts)} restarts, "
            f"{size(last.size_bytes)}, servers closed {last.pause_s:.2f} s"
        )
    lines.append(f"results  {directory / 'rollouts.jsonl'}")
    if counts.failed:
        lines.append(f"failures {directory / 'failures.jsonl'}")
    if summary.resume_command is not None:
        lines.append(f"go on with: {summary.resume_command}")
    return lines


def _metrics(summary: Summary) -> list[str]:
    """Over every sample of the run, whoever collected it when."""
    if summary.metrics is None or (mean := summary.metrics.whole.mean_scored) is None:
        return []
    scores = summary.metrics.whole
    interval = "" if mean.low is None or mean.high is None else f" (95 % {mean.low:.4f} to {mean.high:.4f})"
    told = f"mean reward {mean.value:.4f}{interval} over {count(scores.samples)} samples of {count(scores.tasks)} tasks"
    if scores.samples < scores.planned and scores.mean_planned is not None:
        told += f"; {scores.mean_planned.value:.4f} over all {count(scores.planned)} planned"
    passes = ", ".join(f"pass@{k} {value:.4f}" for k, value in scores.pass_at.items())
    return [told, passes] if passes else [told]


def _counts(summary: Summary) -> str:
    counts = summary.counts
    return (
        f"planned {count(counts.planned)}: succeeded {count(counts.succeeded)}, failed {count(counts.failed)}, "
        f"omitted {count(counts.omitted)}, unresolved {count(counts.unresolved)}"
    )
