"""What checkpoints cost a run: how long admission is closed, and how much slower rollouts finish.

    python scripts/bench/pause.py [--in-flight 1000] [--rollouts 2000] [--every 30s] [--rounds 2]

Runs `gymckpt collect @workbench` with embedded servers, in turn without checkpoints and with one every so often, and
prints the pause (seconds that admission was closed, as the collector measured it: median and p99 over all checkpoints)
and the ratio of throughputs. Rates are taken between the first and the last tenth of the rollouts.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TASKS = 200


def collect(directory: Path, in_flight: int, rollouts: int, every: str) -> tuple[float, list[dict[str, Any]]]:
    """One run: rollouts a second, and the `checkpoint` events."""
    command = [
        *(sys.executable, "-m", "gymckpt.commands", "collect", "@workbench", "--json"),
        *("--repeats", str(-(-rollouts // TASKS)), "--concurrency", str(in_flight), "--checkpoint-every", every),
        *("--run-dir", str(directory), "--checkpoint-timeout", "120s"),
    ]
    finished: list[float] = []
    checkpoints: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "outcome":
                finished.append(time.monotonic())
            elif event["event"] == "checkpoint":
                checkpoints.append(event)
            elif event["event"] == "checkpoint_failed":
                print(f"a checkpoint failed: {event['reason']}", file=sys.stderr)
    if process.returncode != 0:
        raise SystemExit(f"collect ended with {process.returncode}")
    tenth = len(finished) // 10
    steady = finished[tenth:-tenth]
    return (len(steady) - 1) / (steady[-1] - steady[0]), checkpoints


def percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what checkpoints cost a run")
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--every", default="30s")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    ratios: list[float] = []
    taken: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="gymckpt-bench-") as directory:
            rates: dict[str, float] = {}
            for every in ("off", arguments.every):
                rate, checkpoints = collect(Path(directory) / every, arguments.in_flight, arguments.rollouts, every)
                rates[every] = rate
                taken += checkpoints
            ratios.append(rates[arguments.every] / rates["off"])
            print(f"round {number + 1}: throughput with / without checkpoints {ratios[-1]:.3f}", flush=True)
    pauses = [event["pause_s"] for event in taken]
    if not pauses:
        raise SystemExit("no checkpoint was taken: give more rollouts or a shorter --every")
    episodes = statistics.median(event["episodes"] for event in taken)
    print(f"checkpoints {len(pauses)}, episodes in one (median) {episodes:.0f}")
    print(f"admission closed: median {statistics.median(pauses):.3f} s, p99 {percentile(pauses, 0.99):.3f} s")
    print(f"throughput with a checkpoint every {arguments.every} / without: {statistics.median(ratios):.3f} (median)")


if __name__ == "__main__":
    main()
