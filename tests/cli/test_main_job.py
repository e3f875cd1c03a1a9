"""The verbs on real runs: bundled servers, real processes, real sockets."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.cli.runs import ROLLOUTS, collecting, deployment_file, until
from tests.cli.schemafiles import wrong_files
from tests.cli.terminal import gymckpt, inline


def test_inspect_lists_checkpoints_episodes_and_boundaries(run: Path) -> None:
    seen = json.loads(inline("inspect", str(run), "--json").stdout)
    assert seen["planned"] == seen["unresolved"] == ROLLOUTS
    newest = seen["checkpoints"][-1]
    assert newest["checkpoint_id"] == seen["checkpoint_id"]
    assert (newest["valid"], newest["episodes"], newest["restarts"]) == (True, ROLLOUTS, 0)
    assert [episode["restart"] for episode in seen["episodes"]] == [None] * ROLLOUTS
    assert all(episode["boundary"]["number"] >= 1 for episode in seen["episodes"])
    table = inline("inspect", str(run)).stdout
    assert f"planned {ROLLOUTS}" in table
    assert f"invoke_agent/{seen['episodes'][0]['boundary']['number']}" in table


def test_inspect_cuts_a_long_list_and_says_so(run: Path) -> None:
    seen = json.loads(inline("inspect", str(run), "--limit", "1", "--json").stdout)
    assert (len(seen["episodes"]), seen["truncated"]) == (1, True)
    assert seen["checkpoints"][-1]["episodes"] == ROLLOUTS
    assert f"the first 1 of {ROLLOUTS}" in inline("inspect", str(run), "--limit", "1").stdout


def test_inspect_shows_the_conversation_of_an_episode(run: Path) -> None:
    rollout_id = json.loads(inline("inspect", str(run), "--json").stdout)["episodes"][0]["rollout_id"]
    items = json.loads(inline("inspect", str(run), rollout_id, "--json").stdout)["items"]
    assert any(item.get("role") == "user" for item in items)
    shown = inline("inspect", str(run), rollout_id).stdout
    assert "user: " in shown
    assert inline("inspect", str(run), "no-such-1-0").returncode == 2


def test_one_checkpoint_of_a_run_and_a_copy_of_it_elsewhere(run: Path, tmp_path: Path) -> None:
    checkpoint_id = json.loads(inline("inspect", str(run), "--json").stdout)["checkpoint_id"]
    inside = run / "checkpoints" / checkpoint_id
    assert json.loads(inline("inspect", str(inside), "--json").stdout)["planned"] == ROLLOUTS
    alone = shutil.copytree(inside, tmp_path / checkpoint_id)
    seen = json.loads(inline("inspect", str(alone), "--json").stdout)
    assert (seen["planned"], len(seen["episodes"])) == (None, ROLLOUTS)
    verified = json.loads(inline("verify", str(alone), "--json").stdout)
    assert (verified["checkpoints"][0]["valid"], verified["restorable"]) == (True, None)
    refused = gymckpt("restore", str(alone))
    assert refused.returncode == 3
    assert "one checkpoint without its run" in refused.stderr


def test_verify_names_the_damage_and_what_can_still_be_restored(run: Path) -> None:
    whole = json.loads(inline("verify", str(run), "--json").stdout)
    assert all(checkpoint["valid"] for checkpoint in whole["checkpoints"])
    newest = whole["restorable"]
    assert newest == whole["checkpoints"][-1]["checkpoint_id"]
    (segment,) = list((run / "checkpoints" / newest / "gym" / "agent" / "agent").glob("segment-*"))[-1:]
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.unlink()
    segment.write_bytes(data)
    done = inline("verify", str(run), "--json")
    assert done.returncode == 4
    damaged = json.loads(done.stdout)
    (problem, *_) = damaged["checkpoints"][-1]["problems"]
    assert segment.name in problem["file"]
    assert damaged["restorable"] != newest
    assert segment.name in inline("verify", str(run)).stdout


@pytest.mark.timeout(300)  # several starts of five processes, perhaps beside other tests
def test_restore_goes_on_and_every_reading_verb_agrees(run: Path) -> None:
    done = gymckpt("restore", str(run), "--json")
    assert done.returncode in (0, 1), done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (restored,) = (event for event in events if event["event"] == "restored")
    assert (restored["episodes"], restored["restarted"]) == (ROLLOUTS, 0)
    last = events[-1]
    assert (last["event"], last["succeeded"] + last["failed"]) == ("done", ROLLOUTS)

    seen = json.loads(inline("inspect", str(run), "--json").stdout)
    assert {name: seen[name] for name in ("succeeded", "failed", "unresolved")} == {
        name: last[name] for name in ("succeeded", "failed", "unresolved")
    }
    rows = [json.loads(line) for line in inline("export", str(run)).stdout.splitlines()]
    order = [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows]
    assert order == sorted(set(order))
    assert len(rows) == last["succeeded"]
    assert all(row["_ng_attempt_index"] == 1 for row in rows)

    again = gymckpt("restore", str(run))
    assert again.returncode == 0
    assert "nothing to resume" in again.stdout
    assert gymckpt("collect", "@workbench", "--run-dir", str(run)).returncode == 3
    asked = inline("checkpoint", str(run))
    assert asked.returncode == 3
    assert "no collector runs" in asked.stderr
    assert wrong_files(run) == []
    before = sorted(path.name for path in run.rglob("*"))
    tried = gymckpt("restore", str(run), "--dry-run", "--url", "nobody=http://127.0.0.1:9")
    assert tried.returncode == 0, tried.stderr
    assert "nothing to resume" in tried.stderr
    assert sorted(path.name for path in run.rglob("*")) == before


def test_a_checkpoint_that_is_not_there_is_a_usage_error(run: Path, tmp_path: Path) -> None:
    verbs: list[list[str]] = [["inspect"], ["verify"], ["prune"], ["export", "--gym", str(tmp_path / "new")]]
    for verb, *more in verbs:
        done = inline(verb, str(run), "--checkpoint", "ckpt-000099-00000000", *more)
        assert done.returncode == 2, done.stderr
        assert "ckpt-000099-00000000" in done.stderr


def test_export_writes_a_new_file_and_never_over_another(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "rows.jsonl.zst"
    assert inline("export", str(run), "--format", "jsonl.zst", "--output", str(target)).returncode == 0
    refused = inline("export", str(run), "--output", str(target))
    assert refused.returncode == 3
    assert "nothing was overwritten" in refused.stderr
    assert inline("export", str(run), "--gym", str(tmp_path)).returncode == 3
    assert inline("export", str(run), "--output", "-").stdout == inline("export", str(run)).stdout


def test_a_checkpoint_in_gyms_own_form_lists_the_same_episodes(run: Path, tmp_path: Path) -> None:
    assert inline("export", str(run), "--gym", str(tmp_path / "step_1")).returncode == 0
    ours, gyms = (
        json.loads(inline("inspect", str(path), "--json").stdout)["episodes"] for path in (run, tmp_path / "step_1")
    )
    assert [(e["rollout_id"], e["attempt"], e["kinds"]) for e in ours] == [
        (e["rollout_id"], e["attempt"], e["kinds"]) for e in gyms
    ]
    assert json.loads(inline("verify", str(tmp_path / "step_1"), "--json").stdout)["checkpoints"][0]["valid"]


def test_prune_keeps_the_newest(run: Path) -> None:
    before = json.loads(inline("inspect", str(run), "--json").stdout)["checkpoints"]
    removed = json.loads(inline("prune", str(run), "--json").stdout)["removed"]
    after = json.loads(inline("inspect", str(run), "--json").stdout)["checkpoints"]
    assert after == before[-1:]
    assert removed == [checkpoint["checkpoint_id"] for checkpoint in before[:-1]]


@pytest.mark.timeout(300)  # several starts of five processes, perhaps beside other tests
def test_a_running_collection_can_be_asked_stopped_and_gone_on_with(tmp_path: Path) -> None:
    slow = str(deployment_file(tmp_path, 3.0))
    arguments = ["@workbench", "--limit", str(ROLLOUTS), "--serve-config", slow, "--checkpoint-every", "off"]
    run = tmp_path / "run"
    with collecting(*arguments, "--run-dir", str(run), cwd=tmp_path) as process:
        assert process.stderr is not None
        started = until(process, "started")
        assert started["pid"] == process.pid
        taken = gymckpt("checkpoint", str(run), "--name", "keep-me", "--json")
        assert taken.returncode == 0, taken.stderr
        checkpoint_id = json.loads(taken.stdout)["checkpoint_id"]
        (listed,) = json.loads(inline("inspect", str(run), "--json").stdout)["checkpoints"]
        assert (listed["checkpoint_id"], listed["name"]) == (checkpoint_id, "keep-me")
        for refused in (gymckpt("collect", *arguments, "--run-dir", str(run), "--resume"), inline("prune", str(run))):
            assert refused.returncode == 3
            assert "is held by" in refused.stderr
        process.send_signal(signal.SIGINT)  # Ctrl-C is no success
        assert process.stdout is not None
        events = [json.loads(line) for line in process.stdout]
        assert process.wait() == 75
        told = process.stderr.read()
    assert events[-1]["event"] == "done"
    assert events[-1]["exit_code"] == 75
    assert any(event["event"] == "checkpoint" for event in events)
    (command,) = (line.removeprefix("go on with: gymckpt ") for line in told.splitlines() if "go on with" in line)
    fast = str(deployment_file(tmp_path, 0.0))
    assert gymckpt(*command.split(), "--serve-config", fast, cwd=tmp_path).returncode in (0, 1)
    (named,) = (c for c in json.loads(inline("inspect", str(run), "--json").stdout)["checkpoints"] if c["name"])
    assert named["checkpoint_id"] == checkpoint_id


def _marked(mark: str) -> list[int]:
    """Processes that were started with `mark` in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_stopped_while_servers_start_it_exits_75_and_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"MARK_OF_THIS_TEST={tmp_path}"
    monkeypatch.setenv(*mark.split("=", 1))
    with collecting("@workbench", "--run-dir", str(tmp_path / "run"), cwd=tmp_path) as process:
        until(process, "note")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        told = process.stderr.read()
        assert process.wait() == 75
    assert "give the same collect command again" in told
    assert not _marked(mark)
    assert not (tmp_path / "run" / "run.json").exists()


def test_without_servers_it_says_how_to_name_them(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    done = gymckpt("collect", "tasks.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert "--url" in done.stderr
