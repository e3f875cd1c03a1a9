"""What verify and restore say of checkpoints that were published and are not there, or cannot be used."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymckpt.ports import ThreadOffload
from gymckpt.storage.checkpoints import CheckpointDirectory, Collection
from gymckpt.storage.files import LocalFileSystem
from tests.cli.runs import ROLLOUTS
from tests.cli.terminal import gymckpt, inline

OTHER = "ckpt-000099-00000000"


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def move_away(path: Path) -> None:
    shutil.move(path, path.parents[2] / path.name)


def link(path: Path) -> None:
    move_away(path)
    path.symlink_to(path.parents[2] / path.name)


def verified(run: Path, *more: str) -> tuple[int, dict[str, Any]]:
    done = inline("verify", str(run), "--json", *more)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("quick", [(), ("--quick",)])
@pytest.mark.parametrize(
    ("lose", "told"),
    [
        (move_away, "was published, and is not there"),
        (link, "is not a directory"),
        (lambda path: (path / "CHECKPOINT.json").unlink(), "CHECKPOINT.json is missing"),
    ],
    ids=["gone", "symlink", "unmarked"],
)
def test_a_published_checkpoint_that_is_lost_is_missed(
    run: Path, lose: Callable[[Path], object], told: str, quick: tuple[str, ...]
) -> None:
    older, newest = checkpoints(run)
    lose(newest)
    code, document = verified(run, *quick)
    assert code == 4
    assert document["restorable"] == older.name
    found = {checkpoint["checkpoint_id"]: checkpoint for checkpoint in document["checkpoints"]}
    assert [found[older.name]["valid"], found[newest.name]["valid"]] == [True, False]
    (problem,) = found[newest.name]["problems"]
    assert problem["file"].startswith(f"checkpoints/{newest.name}")
    assert told in problem["what"]
    move_away(older)
    code, document = verified(run, *quick)
    assert (code, document["restorable"], len(document["checkpoints"])) == (4, None, 2)


def test_a_restore_says_what_it_passes_over(run: Path) -> None:
    older, newest = checkpoints(run)
    move_away(newest)
    done = gymckpt("restore", str(run), "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert any(
        event["event"] == "note" and f"{newest.name} was published, and is not there" in event["text"]
        for event in events
    )
    (restored,) = (event for event in events if event["event"] == "restored")
    assert (restored["checkpoint_id"], restored["episodes"]) == (older.name, ROLLOUTS)


def test_a_checkpoint_of_another_run_is_said_to_be_of_no_use(run: Path) -> None:
    directory = CheckpointDirectory(LocalFileSystem(), ThreadOffload(), run / "checkpoints")

    async def publish() -> None:
        await directory.begin(OTHER)
        await directory.publish(OTHER, Collection(OTHER, "f" * 32, 99, 9, 1.0))

    newest = checkpoints(run)[-1].name
    asyncio.run(publish())
    code, document = verified(run)
    assert (code, document["restorable"]) == (4, newest)
    (problem,) = next(c["problems"] for c in document["checkpoints"] if c["checkpoint_id"] == OTHER)
    assert "is of run ffff" in problem["what"]


def test_what_prune_removed_is_not_missed_and_what_is_gone_can_be_written_off(run: Path) -> None:
    older, newest = checkpoints(run)
    assert inline("prune", str(run), "--keep", "1").stdout == f"removed {older.name}\n"
    assert verified(run)[0] == 0
    move_away(newest)
    assert inline("prune", str(run)).stdout == "nothing to remove\n"
    assert verified(run)[0] == 4
    assert inline("prune", str(run), "--checkpoint", newest.name).stdout == f"{newest.name} was gone already\n"
    assert verified(run)[0] == 0
    assert inline("prune", str(run), "--checkpoint", newest.name).returncode == 2


def test_one_that_was_gone_before_is_written_off_with_the_older_ones(run: Path) -> None:
    older, _ = checkpoints(run)
    move_away(older)
    assert verified(run)[0] == 4
    assert inline("prune", str(run)).stdout == f"{older.name} was gone already\n"
    assert verified(run)[0] == 0


def test_quick_looks_at_no_record(run: Path) -> None:
    newest = checkpoints(run)[-1]
    segment = max(newest.glob("gym/agent/agent/segment-*"), key=lambda path: path.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.unlink()
    segment.write_bytes(data)
    assert verified(run, "--quick")[0] == 0
    code, document = verified(run)
    assert code == 4
    assert not next(c["valid"] for c in document["checkpoints"] if c["checkpoint_id"] == newest.name)


@pytest.mark.parametrize("name", ["journal", "checkpoints"])
def test_a_directory_of_the_run_is_no_symlink(run: Path, name: str) -> None:
    shutil.move(run / name, run.parent / "elsewhere")
    (run / name).symlink_to(run.parent / "elsewhere")
    for arguments in (["verify", str(run)], ["restore", str(run)]):
        done = gymckpt(*arguments)
        assert done.returncode == 4, (arguments, done.stderr)
        assert f"{name} is not a directory" in done.stdout + done.stderr
