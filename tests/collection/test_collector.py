"""The collector from end to end, on servers without the control plane."""

from pathlib import Path

from gymckpt.collection.run import Counts
from tests.collection.deployments import plain, typed_row


def test_every_planned_rollout_has_one_outcome_and_one_row(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run")
    summary = collected.collect([typed_row(n) for n in range(5)], repeats=2, concurrency=3)
    assert summary.exit_code == 0
    assert summary.counts == Counts(10, 10, 0, 0, 0)
    rows = collected.lines("rollouts.jsonl")
    assert sorted((row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows) == [
        (task, repeat) for task in range(5) for repeat in range(2)
    ]
    assert {row["response"]["seed"] for row in rows} >= {"numbers/0", "numbers/0/1"}
    assert len(environment.bodies) == 10
    assert collected.events[-1] == {
        "event": "done",
        "run_id": summary.run_id,
        "planned": 10,
        "succeeded": 10,
        "failed": 0,
        "omitted": 0,
        "unresolved": 0,
        "exit_code": 0,
    }
