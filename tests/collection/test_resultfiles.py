"""rollouts.jsonl under two collectors: one that lost the run adds no row, and what it had on its way does not stay."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gymckpt.collection.events import Outcome, RowsWritten
from gymckpt.collection.journals import Journals
from gymckpt.collection.lock import Holder, RunLock
from gymckpt.collection.resultfiles import ResultFiles
from gymckpt.collection.rundirectory import RunPaths
from gymckpt.errors import NotAsAsked
from gymckpt.identity import EpisodeId
from gymckpt.ports import SystemClock, ThreadOffload
from gymckpt.storage.files import LocalFileSystem


def row(number: int) -> Outcome:
    return Outcome(EpisodeId(f"r-{number}-0", 0), "succeeded", reward=1.0, row={"_ng_task_index": number})


class Collector:
    """As much of one as writes rows."""

    def __init__(self, directory: Path, number: int) -> None:
        self.paths = RunPaths(directory)
        holder = Holder("test", number, str(number))
        self.fs, self.offload = LocalFileSystem(), ThreadOffload()
        self.lock = RunLock(self.fs, self.offload, SystemClock(), self.paths, holder=holder, lives=lambda holder: True)
        self.files = ResultFiles(self.fs, self.offload, self.paths, self.lock.check_now)

    async def begin(self, **how: Any) -> "Collector":
        await self.lock.take(**how)
        self.journals = Journals(self.fs, self.offload, SystemClock(), self.paths.journal, epoch=self.lock.epoch)
        await self.journals.open()
        await self.files.open(RowsWritten(0, 0, 0), self.journals, lambda rollout_id: 0)
        return self

    async def end(self) -> None:
        await self.files.close()
        await self.journals.close()
        await self.lock.release()


def test_a_collector_that_lost_the_run_adds_no_row_and_one_that_was_on_its_way_is_cut_off(tmp_path: Path) -> None:
    async def both() -> None:
        robbed = await Collector(tmp_path, 1).begin()
        robbed.files.add(1, row(1))
        thief = await Collector(tmp_path, 2).begin(steal=True)
        with pytest.raises(NotAsAsked, match="was taken"):
            await robbed.files.flush()
        rollouts = tmp_path / "rollouts.jsonl"
        assert rollouts.read_bytes() == b""
        with rollouts.open("ab") as file:  # as if the robbed one had looked just before
            file.write(b'{"_ng_task_index":1}\n')
        thief.files.add(1, row(2))
        await thief.files.flush()
        assert rollouts.read_bytes() == b'{"_ng_task_index":2}\n'
        await robbed.end()
        await thief.end()

    asyncio.run(both())
