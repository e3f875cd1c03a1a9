"""`verify` compares the result files with the journal, and what it says of mending them is so."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gymckpt.collection import resultfiles
from gymckpt.collection.events import Reopened, RowsWritten
from gymckpt.collection.reopening import held
from gymckpt.collection.rundirectory import RunPaths
from gymckpt.report.documents import VerifyDocument
from gymckpt.report.inspection import Target
from gymckpt.report.verification import verify
from tests.collection.deployments import Collected, plain, typed_row

Change = Callable[[Path], object]


@pytest.fixture
def collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Collected:
    """A complete run of four rows, which are compared one at a time."""
    monkeypatch.setattr(resultfiles, "BATCH_BYTES", 0)
    done, _ = plain(tmp_path / "run")
    assert done.collect([typed_row(n) for n in range(4)], concurrency=1).exit_code == 0
    return done


def verified(collected: Collected) -> VerifyDocument:
    ports = collected.ports
    return asyncio.run(verify(ports.fs, ports.offload, Target(RunPaths(collected.directory), None)))


def flip(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"_ng_task_index":2', b'"_ng_task_index":9'))


def swap(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[2], lines[1], lines[3]]))


def add(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b'{"reward":1.0}\n')


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def test_whole_files_are_whole(collected: Collected) -> None:
    assert verified(collected).found == []


@pytest.mark.parametrize(
    ("change", "told", "mended"),
    [
        (flip, "line 3: it is not the row of", False),
        (swap, "line 2: it is not the row of", False),
        (lambda path: os.truncate(path, 40), "line 1: ", True),
        (Path.unlink, "is missing", True),
        (add, "line 5: the journal holds no row for it", True),
        (fifo, "is not a regular file", False),
    ],
    ids=["flip", "swap", "short", "missing", "added", "pipe"],
)
def test_the_first_difference_is_named_and_mended_as_it_says(
    collected: Collected, change: Change, told: str, mended: bool
) -> None:
    path = collected.directory / "rollouts.jsonl"
    whole = path.read_bytes()
    change(path)
    (problem,) = verified(collected).problems
    assert problem.file == "rollouts.jsonl"
    assert told in problem.what
    assert "gymckpt restore writes it again" in problem.what
    assert ("remove" in problem.what) is not mended
    if not mended:
        path.unlink()
    assert collected.restore().nothing_to_resume
    assert path.read_bytes() == whole
    assert verified(collected).found == []


def test_a_row_that_is_being_written_is_no_difference(collected: Collected) -> None:
    async def forget_what_was_synced() -> None:
        async with held(collected.directory, collected.ports) as opened:
            await opened.journals.append(RowsWritten(0, 0, 0))

    asyncio.run(forget_what_was_synced())
    path = collected.directory / "rollouts.jsonl"
    os.truncate(path, path.stat().st_size - 10)
    assert verified(collected).found == []


def test_a_row_that_lost_its_force_may_be_there_or_not(collected: Collected) -> None:
    path = collected.directory / "rollouts.jsonl"
    rows = path.read_bytes()

    async def judge_again() -> None:
        async with held(collected.directory, collected.ports) as opened:
            outcome, stored = next(iter(opened.journals.outcomes()))
            again = replace(outcome, opening=1, reward=0.5, row=await opened.journals.row(stored))
            await opened.journals.append(again)
            rollout_id, attempt = outcome.episode
            await opened.journals.append(Reopened(rollout_id, 1, attempt, "again"))
            await opened.journals.append(RowsWritten(0, 0, 0))

    asyncio.run(judge_again())
    assert verified(collected).found == []  # as if it had died before it wrote the files anew
    assert collected.restore().nothing_to_resume
    assert len(path.read_bytes()) == len(rows)
    assert path.read_bytes() != rows
    assert verified(collected).found == []
