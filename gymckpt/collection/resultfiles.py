"""rollouts.jsonl and failures.jsonl: copies of what the outcomes journal holds, in its order, made good on resume.

A row is appended after its outcome is durable. From time to time both files are synced and an event records how far
they went; on resume what lies beyond is cut off and written again from the journal. A collector that has lost the run
writes no row; should one of its rows be on its way at that moment, the next write of the new holder cuts it off.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import PurePath

from gymckpt import jsoncodec
from gymckpt.collection.events import Outcome, RowsWritten
from gymckpt.collection.journals import Journals
from gymckpt.collection.rundirectory import RunPaths
from gymckpt.errors import DamagedState
from gymckpt.ports import FileSystem, Offload, WriteHandle
from gymckpt.storage.durable import exists, sync, sync_directory, writing
from gymckpt.storage.outcomes import Outcome as StoredOutcome

BATCH_BYTES = 4 << 20


class ResultFiles:
    """Appends rows to the two files. `add` only remembers; `flush` writes.

    `check_holder` (blocking) raises `NotAsAsked` where another process holds the run.
    """

    def __init__(self, fs: FileSystem, offload: Offload, paths: RunPaths, check_holder: Callable[[], None]) -> None:
        self._fs = fs
        self._offload = offload
        self._check_holder = check_holder
        self._paths = {True: paths.rollouts, False: paths.failures}
        self._handles: dict[bool, WriteHandle] = {}
        self._sizes = {True: 0, False: 0}
        self._waiting: list[tuple[int, Outcome]] = []
        self._written = 0
        self._synced = RowsWritten(0, 0, 0)

    @property
    def unsynced(self) -> int:
        """Outcomes since the last record of how far the files went."""
        return self._written - self._synced.outcomes + len(self._waiting)

    def add(self, sequence: int, outcome: Outcome) -> None:
        """Take an outcome that is durable under this number, in the order of the journal."""
        self._waiting.append((sequence, outcome))

    async def open(self, written: RowsWritten, journals: Journals, opening: Callable[[str], int]) -> None:
        """Cut both files to where `written` says they are good, and add what the journal has beyond.

        A file that is shorter than that was changed by somebody: both are written anew from the journal.
        """
        good = await self._offload.run(lambda: self._cut(written))
        self._synced = good
        self._written = good.outcomes
        missing = (pair for pair in journals.outcomes() if pair[1].sequence > good.outcomes)
        while batch := await self._offload.run(lambda: batch_of(missing)):
            rows = await journals.rows([stored for _, stored in batch])
            for (outcome, stored), row in zip(batch, rows, strict=True):
                # A rollout that was reopened has one row, that of its newest opening.
                newest = outcome.final and outcome.opening == opening(outcome.episode.rollout_id)
                counts = outcome.outcome != "succeeded" or newest
                self.add(stored.sequence, replace(outcome, row=row if counts else None))
            await self.flush()

    def _cut(self, written: RowsWritten) -> RowsWritten:
        ends = {True: written.rollouts_bytes, False: written.failures_bytes}
        sizes = {kind: self._size(path) for kind, path in self._paths.items()}
        if any(sizes[kind] < end for kind, end in ends.items()):
            written, ends = RowsWritten(0, 0, 0), {True: 0, False: 0}
        for kind, path in self._paths.items():
            with writing(path):
                if sizes[kind] > ends[kind]:
                    self._fs.truncate(path, ends[kind])
                if not exists(self._fs, path):
                    self._fs.create(path).close()
                    sync_directory(self._fs, path.parent)
                self._handles[kind] = self._fs.append(path)
            self._sizes[kind] = ends[kind]
        return written

    def _size(self, path: PurePath) -> int:
        entry = exists(self._fs, path)
        if entry is not None and entry.kind != "file":
            raise DamagedState(
                f"{path} is not a regular file", hint="remove it, and go on: it is written anew from the journal"
            )
        return entry.size_bytes if entry else 0

    async def flush(self, *, durable: bool = False) -> RowsWritten | None:
        """Write what waits. With `durable`, sync both files and give the event that says how far they went, to be
        recorded by the caller; None if there is nothing new to say."""
        batch, self._waiting = self._waiting, []
        try:
            await self._offload.run(lambda: self._write(batch, durable))
        except BaseException:
            self._waiting = batch + self._waiting
            raise
        if batch:
            self._written = batch[-1][0]
        if not durable or self._written == self._synced.outcomes:
            return None
        self._synced = RowsWritten(self._written, self._sizes[True], self._sizes[False])
        return self._synced

    def _write(self, batch: list[tuple[int, Outcome]], durable: bool) -> None:
        data = {kind: _lines(batch, kind) for kind in self._paths}
        self._check_holder()
        for kind, path in self._paths.items():
            if self._size(path) > self._sizes[kind]:
                with writing(path):
                    self._fs.truncate(path, self._sizes[kind])
        try:
            for kind, path in self._paths.items():
                if data[kind]:
                    with writing(path):
                        self._handles[kind].write(data[kind])
        except BaseException:
            # What was written of it goes, so that a second try does not double a row.
            for kind, path in self._paths.items():
                with writing(path):
                    self._fs.truncate(path, self._sizes[kind])
            raise
        for kind, path in self._paths.items():
            self._sizes[kind] += len(data[kind])
            if durable:
                sync(self._handles[kind], path)

    async def close(self) -> None:
        """Let go of the files."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            await self._offload.run(handle.close)


def file_of(outcome: Outcome) -> bool | None:
    """Where its row goes, if it has one: True rollouts.jsonl, False failures.jsonl, None neither."""
    succeeded = outcome.outcome == "succeeded"
    return None if succeeded and not outcome.final else succeeded


def _lines(batch: list[tuple[int, Outcome]], succeeded: bool) -> bytes:
    rows = [
        jsoncodec.dumps(outcome.row)
        for _, outcome in batch
        if outcome.row is not None and file_of(outcome) is succeeded
    ]
    return b"".join(row + b"\n" for row in rows)


def batch_of(outcomes: Iterator[tuple[Outcome, StoredOutcome]]) -> list[tuple[Outcome, StoredOutcome]]:
    """As many as are worth one read: few large rows, or many small ones."""
    batch: list[tuple[Outcome, StoredOutcome]] = []
    size = 0
    for pair in outcomes:
        batch.append(pair)
        size += pair[1].place.length
        if size > BATCH_BYTES:
            break
    return batch
