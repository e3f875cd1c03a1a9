"""The main job with an installed `gymckpt`: collect, kill everything, inspect, restore, and look at the numbers.

Usage: python main_job.py PATH_OF_GYMCKPT, in an empty folder. Standard library only.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROLLOUTS = 16
CONTINUED_AT_LEAST = 4


def main() -> None:
    """Run the job; an assertion names what did not hold."""
    gymckpt = sys.argv[1]
    run = Path("run")
    arguments = ["@workbench", "--limit", str(ROLLOUTS), "--concurrency", "8", "--checkpoint-every", "1s"]
    collector = subprocess.Popen(
        [gymckpt, "collect", *arguments, "--run-dir", str(run), "--json"], stdout=subprocess.PIPE, text=True
    )
    assert collector.stdout is not None
    for line in collector.stdout:
        event = json.loads(line)
        if event["event"] == "checkpoint" and event["episodes"] >= CONTINUED_AT_LEAST:
            break
        assert event["event"] != "done", "the run ended before a checkpoint held enough episodes to be worth a kill"
    # The servers have sessions of their own; they end because the pipe from their supervisor does.
    collector.kill()
    collector.wait()
    print(f"killed after {event['checkpoint_id']} with {event['episodes']} episodes")

    inspected = _json(gymckpt, "inspect", str(run), "--json")
    assert inspected["planned"] == ROLLOUTS, inspected
    assert sum(episode["restart"] is None for episode in inspected["episodes"]) >= CONTINUED_AT_LEAST, inspected
    assert _json(gymckpt, "verify", str(run), "--json")["restorable"] == inspected["checkpoint_id"]

    restored = subprocess.run(
        [gymckpt, "restore", str(run), "--json"], stdout=subprocess.PIPE, text=True, check=False, timeout=300
    )
    events = [json.loads(line) for line in restored.stdout.splitlines()]
    assert restored.returncode in (0, 1), restored
    assert any(event["event"] == "restored" and event["episodes"] > 0 for event in events), events[:5]
    done = events[-1]
    assert done["event"] == "done", done
    assert done["succeeded"] + done["failed"] == ROLLOUTS, done
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_bytes().split(b"\n") if line]
    assert len({row["_ng_rollout_id"] for row in rows}) == len(rows) == done["succeeded"], done
    print(f"restored and finished: {json.dumps(done)}")


def _json(*command: str) -> Any:
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120).stdout)


if __name__ == "__main__":
    main()
