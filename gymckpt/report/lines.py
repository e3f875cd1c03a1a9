"""A running collection in words: the same facts for the live display and for its plain twin."""

from collections.abc import Iterator, Mapping
from typing import Any

from gymckpt.collection.progress import LastCheckpoint, Progress
from gymckpt.report.words import count, duration, size

DOT = " · "


def finished(progress: Progress) -> int:
    """Rollouts with an outcome, of this process and of earlier ones."""
    counts = progress.counts
    return counts.succeeded + counts.failed + counts.omitted


def percent(progress: Progress) -> float:
    """How much of the plan has an outcome, 0 to 100."""
    planned = progress.counts.planned
    return 100.0 * finished(progress) / planned if planned else 100.0


def pace(progress: Progress) -> str:
    """`2.1/s · ETA 2m 11s`; the rate is that of this process."""
    rate = progress.rate_per_s
    shown = f"{rate:.1f}/s" if rate >= 0.1 or rate == 0 else f"{rate * 60:.1f}/min"
    return shown if progress.eta_s is None else f"{shown}{DOT}ETA {duration(progress.eta_s)}"


def outcomes(progress: Progress) -> str:
    """Counts by outcome, and the mean reward of what this process finished."""
    counts = progress.counts
    parts = [f"succeeded {count(counts.succeeded)}", f"failed {count(counts.failed)}"]
    parts += [f"omitted {count(counts.omitted)}"] if counts.omitted else []
    parts += [f"to do {count(counts.unresolved)}"]
    parts += [f"reward {progress.mean_reward:.3f}"] if progress.mean_reward is not None else []
    return DOT.join(parts)


def flights(progress: Progress) -> str:
    """What is under way."""
    return DOT.join(
        [
            f"in flight {count(progress.in_flight)}",
            f"parked {count(progress.parked)}",
            f"restored {count(progress.restored)}",
            f"attempts {count(progress.attempts)}",
        ]
    )


def checkpoint(progress: Progress, now_s: float) -> str:
    """The last checkpoint, when the next is due, and what stands in the way. `now_s` is unix seconds."""
    last = progress.last_checkpoint
    parts = ["no checkpoint yet"] if last is None else [_last(last, now_s)]
    if progress.checkpoint_failures:
        parts.append(f"{progress.checkpoint_failures} failed in a row")
    if progress.missed_ticks:
        parts.append(f"{progress.missed_ticks} ticks missed")
    if progress.next_checkpoint_s is not None:
        parts.append(f"next in {duration(max(0.0, progress.next_checkpoint_s))}")
    if progress.free_bytes is not None:
        parts.append(f"disk {size(progress.free_bytes)} free")
    return DOT.join(parts)


def _last(last: LastCheckpoint, now_s: float) -> str:
    episodes = f"{count(last.episodes)} episodes" + (f", {count(last.restarts)} restarts" if last.restarts else "")
    parts = [f"checkpoint {duration(max(0.0, now_s - last.at))} ago: {episodes}", size(last.size_bytes)]
    return DOT.join([*parts, f"closed {last.pause_s:.2f} s"])


def slowest(progress: Progress) -> str:
    """The episodes that have been under way for longest; empty if there are none."""
    shown = [f"{slow.episode} {duration(slow.seconds)}" for slow in progress.slowest[:3]]
    return f"slowest: {DOT.join(shown)}" if shown else ""


def plain_line(progress: Progress, now_s: float) -> str:
    """All of it that fits a log: one line."""
    done = f"{count(finished(progress))}/{count(progress.counts.planned)} ({percent(progress):.0f} %)"
    parts = [done, pace(progress), outcomes(progress), flights(progress), checkpoint(progress, now_s)]
    parts += [f"waiting: {'; '.join(progress.paused)}"] if progress.paused else []
    return " | ".join(parts)


def event_lines(event: Mapping[str, Any]) -> Iterator[str]:
    """What a person should read of an event of `collect --json`; outcomes are counted, not told."""
    match event:
        case {"event": "started", "run_id": run_id}:
            yield f"run {run_id}"
        case {"event": "checkpoint", "checkpoint_id": checkpoint_id, "episodes": episodes, "restarts": restarts}:
            yield (
                f"checkpoint {checkpoint_id}: {count(episodes)} episodes, {count(restarts)} restarts, "
                f"{size(event.get('bytes', 0))}, closed {event.get('pause_s', 0.0):.2f} s"
            )
        case {"event": "checkpoint_failed", "reason": reason}:
            yield f"no checkpoint: {reason}"
        case {"event": "restored", "checkpoint_id": checkpoint_id, "episodes": episodes, "restarted": restarted}:
            yield f"restored {count(episodes)} episodes from {checkpoint_id}; {count(restarted)} start over"
        case {"event": "outcome" | "done"}:
            return
        case {"event": "note", "text": text} | {"detail": text}:
            yield str(text)
