"""Whatever a server sends, it costs the rollouts that it answered so, and neither the run nor its journals."""

import json
from pathlib import Path

from tests.cli.terminal import gymckpt, inline
from tests.cli.wild import REPLIES, deep, serving, tasks_file


def test_a_wild_reply_costs_its_own_rollout_and_nothing_else(tmp_path: Path) -> None:
    names, run = list(REPLIES), tmp_path / "run"
    tasks = tasks_file(tmp_path, names)
    with serving() as url:
        flags = ["--url", f"environment={url}", "--run-dir", str(run), "--max-attempts", "1"]
        done = gymckpt("collect", tasks, *flags)
    assert done.returncode == 1, done.stderr
    failures = map(json.loads, (run / "failures.jsonl").read_text().splitlines())
    kinds = {names[row["_ng_task_index"]]: row["failure_kind"] for row in failures}
    assert kinds == {name: kind for name, (_, kind) in REPLIES.items() if kind is not None}
    for verb in ("verify", "report", "export", "inspect", "retry", "restore"):
        told = inline(verb, str(run))
        assert told.returncode == 0, (verb, told.stdout, told.stderr)


def test_a_row_that_is_too_deep_to_be_sent_is_a_bad_row(tmp_path: Path) -> None:
    row = {"task_id": {"taskset": "t", "task_id": "good"}, "task_input": {"responses_create_params": {}}}
    text = json.dumps(row)[:-2] + f', "task_data": {{"deep": {deep(995)}}}}}}}'
    (tmp_path / "tasks.jsonl").write_text(text + "\n")
    with serving() as url:
        told = gymckpt("collect", str(tmp_path / "tasks.jsonl"), "--url", f"environment={url}", cwd=tmp_path)
    assert told.returncode == 2, told.stderr
    assert "line 1: nested more than" in told.stderr
