"""How a collection ended, for the person who started it."""

from gymckpt.collection.collector import Summary
from gymckpt.report.words import count, duration, size


def summary_lines(summary: Summary, mean_reward: float | None) -> list[str]:
    """The last words of `collect` and `restore`; `mean_reward` is over what this process finished."""
    counts, directory = summary.counts, summary.directory
    if summary.nothing_to_resume:
        return [f"nothing to resume: run {summary.run_id} in {directory} is complete", _counts(summary)]
    if summary.dry_run:
        return [f"dry run: all is in place, nothing was sent; {count(counts.unresolved)} rollouts to do"]
    state = "complete" if counts.complete else summary.stopped or "not complete"
    lines = [f"run {summary.run_id} {state} after {duration(summary.elapsed_s)}", _counts(summary)]
    attempts = f"attempts {count(summary.attempts)} (attempts are not samples)"
    lines.append(attempts + (f", {count(summary.restored)} continued from a checkpoint" if summary.restored else ""))
    if mean_reward is not None:
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


def _counts(summary: Summary) -> str:
    counts = summary.counts
    return (
        f"planned {count(counts.planned)}: succeeded {count(counts.succeeded)}, failed {count(counts.failed)}, "
        f"omitted {count(counts.omitted)}, unresolved {count(counts.unresolved)}"
    )
