"""Whether rollouts.jsonl and failures.jsonl are what the outcomes journal says."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import PurePath
from typing import NamedTuple

from gymckpt import jsoncodec
from gymckpt.collection.events import Outcome, RowsWritten
from gymckpt.collection.journals import Journals
from gymckpt.collection.resultfiles import batch_of, file_of
from gymckpt.collection.rundirectory import RunPaths
from gymckpt.errors import DamagedState, StorageUnavailable
from gymckpt.ports import FileSystem, Offload
from gymckpt.storage.durable import exists, reading
from gymckpt.storage.problems import Problem


class ResultCheck:
    """Finds the first difference in each of the two files. Blocking to make.

    To be made before the journals are read: each row that is in a file by then is in them, also while a collector is at
    work.
    """

    def __init__(self, fs: FileSystem, paths: RunPaths) -> None:
        self._files = {True: _File(fs, paths.rollouts), False: _File(fs, paths.failures)}

    async def compare(
        self, offload: Offload, journals: Journals, written: RowsWritten, opening: Callable[[str], int]
    ) -> list[Problem]:
        """What differs from `journals`, which were inspected. `written`: how far both files must go. `opening` gives
        the number of a rollout's newest opening. A few MiB of rows are in memory at a time.

        Raises `DamagedState` for damage of the journal.
        """
        self._files[True].good_bytes = written.rollouts_bytes
        self._files[False].good_bytes = written.failures_bytes
        recorded = journals.outcomes()
        while batch := await offload.run(lambda: batch_of(recorded)):
            rows = await journals.rows([stored for _, stored in batch])
            found = [(outcome, row) for (outcome, _), row in zip(batch, rows, strict=True) if row is not None]
            for kind, file in self._files.items():
                lines = [_line(outcome, row, opening) for outcome, row in found if file_of(outcome) is kind]
                await offload.run(partial(file.compare, lines))
        return [problem for file in self._files.values() for problem in file.end()]


class _Line(NamedTuple):
    outcome: Outcome
    data: bytes
    may_be_absent: bool
    """It has lost its force: it was left out if the file was written anew since."""


def _line(outcome: Outcome, row: object, opening: Callable[[str], int]) -> _Line:
    lost_force = outcome.outcome == "succeeded" and outcome.opening != opening(outcome.episode.rollout_id)
    return _Line(outcome, jsoncodec.dumps(row) + b"\n", lost_force)


class _File:
    """A result file on its way through the journal. Blocking."""

    def __init__(self, fs: FileSystem, path: PurePath) -> None:
        self._fs = fs
        self._path = path
        self._size = 0
        self._missing = False
        self._offset = 0
        self._lines = 0
        self._torn = False
        self._problem: Problem | None = None
        self.good_bytes = 0
        entry = exists(fs, path)
        if entry is None:
            self._missing = True
        elif entry.kind == "file":
            self._size = entry.size_bytes
        else:
            self._problem = Problem(f"{path} is not a regular file: remove it, and gymckpt restore writes it again")

    def compare(self, lines: list[_Line]) -> None:
        """The file must go on with these, or end within them."""
        if self._problem is not None or self._torn or not lines:
            return
        if self._missing:
            self._problem = Problem(f"{self._path} is missing; gymckpt restore writes it again")
            return
        start, length = self._offset, min(sum(len(line.data) for line in lines), self._size - self._offset)
        try:
            with reading(self._path):
                data = self._fs.read(self._path, start, length)
        except (DamagedState, StorageUnavailable) as error:
            self._problem = Problem.of(error)
            return
        for line in lines:
            at = self._offset - start
            if data.startswith(line.data, at):
                self._offset += len(line.data)
                self._lines += 1
            elif line.data.startswith(data[at:]) and start + len(data) == self._size:
                self._torn = True  # the write under way, or the one that a crash cut
                return
            elif not line.may_be_absent:
                self._differs(f"it is not the row of {line.outcome.episode} that the journal holds")
                return

    def end(self) -> Iterator[Problem]:
        """What was found, now that the journal has no more rows."""
        if self._problem is None and self._size < self.good_bytes:
            self._differs(f"the file ends at {self._size} bytes of {self.good_bytes} that were written")
        elif self._problem is None and not self._torn and self._offset < self._size:
            self._differs("the journal holds no row for it")
        if self._problem is not None:
            yield self._problem

    def _differs(self, how: str) -> None:
        # What lies beyond the rows that are known to be good, or of a file that is too short, a restore never believes.
        mended = self._offset >= self.good_bytes or self._size < self.good_bytes
        remedy = "gymckpt restore" if mended else "remove the file, and gymckpt restore"
        self._problem = Problem(f"{self._path} line {self._lines + 1}: {how}; {remedy} writes it again")
