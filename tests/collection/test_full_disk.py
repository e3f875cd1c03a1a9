"""A full disk is waited out, then the run stops and can be resumed; a disk that fails stops it at once."""

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest

from gymckpt.collection import collector, journals
from gymckpt.collection.opening import Ports
from gymckpt.collection.run import Counts
from gymckpt.collection.settings import CollectSettings
from gymckpt.errors import NoSpace, StorageFailed
from gymckpt.ports import WriteHandle
from gymckpt.storage.files import LocalFileSystem
from tests.collection.deployments import Collected, plain, rows, typed_row

TASKS = [typed_row(n) for n in range(6)]


class FailingDisk(LocalFileSystem):
    """Writes to files for which `fails` gives an error number fail with it, after half of them was written."""

    def __init__(self, fails: Callable[[str], int | None]) -> None:
        super().__init__()
        self.fails = fails

    def create(self, path: PurePath) -> WriteHandle:
        return _Handle(super().create(path), path.name, self.fails)

    def append(self, path: PurePath) -> WriteHandle:
        return _Handle(super().append(path), path.name, self.fails)


class _Handle:
    def __init__(self, handle: WriteHandle, name: str, fails: Callable[[str], int | None]) -> None:
        self._handle, self._name, self._fails = handle, name, fails

    def write(self, data: bytes) -> None:
        number = self._fails(self._name)
        if number is not None:
            self._handle.write(data[: len(data) // 2])
            raise OSError(number, os.strerror(number), self._name)
        self._handle.write(data)

    def fsync(self) -> None:
        self._handle.fsync()

    def close(self) -> None:
        self._handle.close()


def times(name: str, number: int, count: int, *, after: int = 0) -> Callable[[str], int | None]:
    """The first `count` writes to files whose name begins with `name` fail, once `after` have passed."""
    seen = 0

    def fails(file: str) -> int | None:
        nonlocal seen
        if not file.startswith(name) or "index" in file:  # an index that cannot be written is done without
            return None
        seen += 1
        return number if after < seen <= after + count else None

    return fails


def collecting(collected: Collected, disk: FailingDisk, **settings: Any) -> Any:
    ports: Ports = replace(collected.ports, fs=disk)
    return asyncio.run(
        collector.collect(
            CollectSettings(tasks="tasks", **settings),
            collected.directory,
            collected.servers,
            ports,
            on_event=collected.events.append,
            source=rows(TASKS),
        )
    )


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "FULL_DISK_AGAIN_S", 0.01)
    monkeypatch.setattr(journals, "FULL_DISK_PATIENCE_S", 0.1)


@pytest.mark.parametrize("name", ["dispatch-", "outcomes-", "events-"])
def test_a_disk_that_is_full_for_a_while_costs_nothing(tmp_path: Path, name: str) -> None:
    collected, environment = plain(tmp_path / "run")
    disk = FailingDisk(times(name, errno.ENOSPC, 3, after=2))
    assert collecting(collected, disk, concurrency=2).counts == Counts(6, 6, 0, 0, 0)
    assert len(environment.bodies) == 6
    assert sorted(row["_ng_task_index"] for row in collected.lines("rollouts.jsonl")) == list(range(6))


def test_a_disk_that_stays_full_stops_the_run_which_then_resumes_without_asking_twice(tmp_path: Path) -> None:
    collected, environment = plain(tmp_path / "run")
    disk = FailingDisk(times("outcomes-", errno.EDQUOT, 10**6, after=3))
    with pytest.raises(NoSpace) as stopped:
        collecting(collected, disk, concurrency=1)
    assert stopped.value.exit_code == 75
    done = len(collected.lines("rollouts.jsonl"))
    environment.bodies.clear()
    assert collected.restore().counts == Counts(6, 6, 0, 0, 0)
    assert len(environment.bodies) == 6 - done


def test_a_device_that_fails_stops_the_run_at_once_and_is_never_called_good(tmp_path: Path) -> None:
    collected, _ = plain(tmp_path / "run")
    disk = FailingDisk(times("outcomes-", errno.EIO, 1, after=3))
    with pytest.raises(StorageFailed) as failed:
        collecting(collected, disk, concurrency=1)
    assert failed.value.exit_code == 4
    assert collected.restore().counts == Counts(6, 6, 0, 0, 0)


def test_a_half_written_row_is_not_left_in_the_results(tmp_path: Path) -> None:
    collected, _ = plain(tmp_path / "run")
    disk = FailingDisk(times("rollouts.jsonl", errno.ENOSPC, 1))
    # The writing at the end of the run fails: the one that makes every row durable.
    with pytest.raises(NoSpace):
        collecting(collected, disk)
    assert collected.restore().nothing_to_resume
    assert sorted(row["_ng_task_index"] for row in collected.lines("rollouts.jsonl")) == list(range(6))
