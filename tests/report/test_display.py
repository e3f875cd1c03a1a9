"""What people see of a running collection."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from gymckpt.collection.progress import LastCheckpoint, Progress, SlowEpisode
from gymckpt.collection.run import Counts
from gymckpt.identity import EpisodeId
from gymckpt.report import lines
from gymckpt.report.display import LiveDisplay, PlainDisplay, render
from gymckpt.report.words import duration, size

NOW_S = 1_800_000_000.0


def _progress(planned: int = 400, succeeded: int = 118, failed: int = 6) -> Progress:
    return Progress(
        run_id="3f2a1b2c" * 4,
        directory="runs/a",
        counts=Counts(planned, succeeded, failed, 0, planned - succeeded - failed),
        in_flight=64,
        parked=3,
        restored=12,
        attempts=190,
        finished_here=24,
        elapsed_s=724.0,
        rate_per_s=2.1,
        eta_s=131.0,
        last_checkpoint=LastCheckpoint("ckpt-000007-01234567", NOW_S - 12, 61, 3, 4_300_000, 0.12, 0.5),
        next_checkpoint_s=48.0,
        checkpoint_failures=0,
        missed_ticks=0,
        free_bytes=120 * 10**9,
        paused=(),
        slowest=(SlowEpisode(EpisodeId("3f2a1b2c-17-0", 1), "environment", 492.0),),
        mean_reward=0.8167,
    )


def _drawn(progress: Progress, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    with console.capture() as capture:
        console.print(render(progress, NOW_S))
    return capture.get().rstrip("\n").split("\n")


@pytest.mark.parametrize("planned", [10, 400, 100_000])
def test_every_line_fits_the_terminal(planned: int) -> None:
    for width in range(60, 201):
        drawn = _drawn(_progress(planned, succeeded=planned // 3, failed=planned // 10), width)
        assert 5 <= len(drawn) <= 7
        assert all(len(line) <= width for line in drawn)
        assert f"{planned:,}".replace(",", "") in drawn[0].replace(",", "").replace(" ", "")
        assert "ETA" in drawn[1] or width < 80


def test_the_display_says_what_an_operator_asks() -> None:
    text = "\n".join(_drawn(_progress(), 200))
    for fact in (
        "124/400 31 %",
        "2.1/s",
        "ETA 2m 11s",
        "succeeded 118",
        "failed 6",
        "in flight 64",
        "parked 3",
        "restored 12",
        "checkpoint 12 s ago: 61 episodes, 3 restarts",
        "4.3 MB",
        "closed 0.12 s",
        "next in 48 s",
        "disk 120.0 GB free",
        "3f2a1b2c-17-0-a1 8m 12s",
    ):
        assert fact in text


def test_why_nothing_is_sent_is_said() -> None:
    waiting = replace(_progress(), paused=("agent does not answer",))
    assert "waiting: agent does not answer" in "\n".join(_drawn(waiting, 100))
    assert "waiting: agent does not answer" in lines.plain_line(waiting, NOW_S)


def test_a_share_is_never_above_the_whole() -> None:
    assert lines.percent(_progress(10, succeeded=8, failed=2)) == 100.0
    assert lines.percent(_progress(0, succeeded=0, failed=0)) == 100.0


def test_the_plain_twin_writes_whole_lines_without_escapes() -> None:
    written: list[str] = []
    with PlainDisplay(written.append, lambda: NOW_S) as display:
        display.event({"event": "started", "run_id": "a" * 32, "pid": 1})
        display.update(_progress())
        display.event({"event": "outcome", "rollout_id": "x", "attempt": 0, "outcome": "succeeded", "reward": 1.0})
        display.event({"event": "checkpoint_failed", "checkpoint_id": None, "reason": "agent still held by x"})
    assert len(written) == 3
    assert all("\n" not in line and "\x1b" not in line for line in written)
    assert "124/400 (31 %)" in written[1]
    assert written[2] == "no checkpoint: agent still held by x"


def test_the_live_display_leaves_the_terminal_as_it_was() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with LiveDisplay(console, lambda: NOW_S) as display:
        display.update(_progress())
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1


def test_durations_and_sizes_read_well() -> None:
    shown = [duration(s) for s in (0.44, 9.99, 12.4, 200, 7500, 277_200)]
    assert shown == ["0.4 s", "10.0 s", "12 s", "3m 20s", "2h 05m", "3d 5h"]
    assert [size(b) for b in (812, 4300, 1_200_000_000, 999_960)] == ["812 B", "4.3 kB", "1.2 GB", "1.0 MB"]
