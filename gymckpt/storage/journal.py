"""An append-only log of events: durable before it is answered, checked in every bit, one set of files per holder."""

from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from gymckpt import jsoncodec
from gymckpt.crashpoints import crash_point, declare
from gymckpt.errors import DamagedState, NotAsAsked, StorageFailed
from gymckpt.ports import FileSystem, Offload, WriteHandle
from gymckpt.storage import durable
from gymckpt.storage.groupcommit import GroupCommit
from gymckpt.storage.journalfiles import (
    Extent,
    JournalFile,
    Position,
    Unit,
    later_lines,
    line_units,
    list_files,
    measure,
    recorded_lengths,
)
from gymckpt.storage.journallines import Line, make_line

BEFORE_WRITE = declare("journal.before_write", "a batch of journal lines is about to be written")
BEFORE_FSYNC = declare("journal.before_fsync", "a batch of journal lines is written, not yet fsynced")
AFTER_FSYNC = declare("journal.after_fsync", "a batch of journal lines is durable, nobody was told")

MAX_FILE_BYTES = 64 << 20
_TIME_GRAIN_S = 0.1
"""Much longer than the clock that stamps files takes for a step."""

Members = tuple[bytes, bytes]
"""What a line holds, as JSON members: those that an index repeats, and the others (with a comma before them)."""


class Journal:
    """The journal `name` in `directory`, written by the holder of `epoch`.

    `inspect` reads and checks without touching anything; `open` begins the epoch; then `append`. Damage is
    `DamagedState` naming file and line. After `StorageFailed` nothing can be appended any more.
    """

    suffix = ".jsonl"

    def __init__(
        self,
        fs: FileSystem,
        offload: Offload,
        directory: PurePath,
        name: str = "dispatch",
        *,
        epoch: int = 1,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._fs = fs
        self._offload = offload
        self._directory = directory
        self._name = name
        self._epoch = epoch
        self._max_file_bytes = max_file_bytes
        self._extents: dict[JournalFile, Extent] = {}
        self._current: JournalFile | None = None
        self._handle: WriteHandle | None = None
        self._broken: StorageFailed | None = None
        self._unchanged_s: float | None = None
        """When the directory last changed, if no later epoch had begun then and whoever begins one changes it again."""
        self._group: GroupCommit[Members, int] = GroupCommit(offload, self._write)

    @property
    def position(self) -> Position:
        """The durable end."""
        if not self._extents:
            return Position("", 0, 0)
        file = max(self._extents)
        return Position(file.name, self._extents[file].bytes, self._extents[file].last_sequence)

    async def inspect(self) -> None:
        """Read and check every file; `replay` and `position` hold afterwards. Changes nothing."""
        await self._offload.run(self._inspect)

    async def open(self, at_least: Position | None = None, *, inspected: bool = False) -> None:
        """Check (unless just `inspected`, by the same holder), cut a torn tail off, and begin the epoch, durably.

        Raises `DamagedState` if the journal ends before `at_least`, which a published checkpoint names: then nothing is
        touched. `NotAsAsked` if this epoch or a later one has begun already.
        """
        await self._offload.run(lambda: self._open(at_least, inspected))

    async def append(self, event: dict[str, Any], *, then: Callable[[int], None] = lambda number: None) -> int:
        """Write `event`; returns its number once it is durable and `then` was told, in the order of the journal.

        A caller that is cancelled does not call the event back.

        Raises `NoSpace` or `StorageUnavailable` (nothing of it is left; it may be appended again later), `NotAsAsked`
        once a later epoch has begun, and `StorageFailed` when nobody knows what reached the disk.
        """
        return await self._group.add((b'"event":' + jsoncodec.dumps(event), b""), then)

    def replay(self) -> Iterator[dict[str, Any]]:
        """Every event, oldest first, as far as `inspect` or `open` found them whole. Blocking."""
        for line in self.lines():
            content = line.content()
            if "event" in content:
                yield content["event"]

    def lines(self) -> Iterator[Line]:
        """Every line that counts, the first ones of epochs among them. Blocking."""
        for file in sorted(self._extents):
            for unit in self._units(file, self._extents[file].bytes):
                yield from unit.lines

    def holds(self, position: Position) -> bool:
        """Whether the journal reaches `position`."""
        return position.sequence == 0 or any(
            file.name == position.file and extent.bytes >= position.bytes and extent.last_sequence >= position.sequence
            for file, extent in self._extents.items()
        )

    async def settled(self) -> None:
        """Wait for what is being written."""
        await self._group.drain()

    async def close(self) -> None:
        """Wait for what is being written, and let go of the file."""
        await self.settled()
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    # Blocking

    def _path(self, file: JournalFile) -> PurePath:
        return self._directory / file.name

    def _units(self, file: JournalFile, limit: int) -> Iterator[Unit]:
        return line_units(self._fs, self._path(file), limit)

    def _later(self, file: JournalFile, start: int, size: int) -> Iterator[Line]:
        return later_lines(self._fs, self._path(file), start, size)

    def _pack(self, numbers: list[int], synced: int, batch: list[Members], start: int) -> bytes:
        """What to write at `start` for `batch`."""
        lines = zip(numbers, batch, strict=True)
        return b"".join(make_line(number, synced, head + rest) for number, (head, rest) in lines)

    def _stored(self, file: JournalFile) -> None:
        """What was packed last is durable in `file`."""

    def _inspect(self) -> None:
        self._extents = {}
        if durable.exists(self._fs, self._directory) is None:
            return
        durable.check_directory(self._fs, self._directory)
        files = list_files(self._fs, self._directory, self._name, self.suffix)
        limits = self._limits(files)
        sequence = 0
        counting = [file for file in files if limits.get(file, 1) != 0]
        for file in counting:
            extent = self._measure(file, limits.get(file), sequence, last=file == counting[-1])
            self._extents[file] = extent
            sequence = extent.last_sequence

    def _limits(self, files: list[JournalFile]) -> dict[JournalFile, int]:
        """How much of each file the next epoch found when it began; nothing of files that it did not find."""
        limits: dict[JournalFile, int] = {}
        for first in files:
            lengths = recorded_lengths(self._first_line(first)) if first.number == 1 else None
            if lengths is None:
                continue
            for file in files:
                if file.epoch < first.epoch and file not in limits:
                    limits[file] = lengths.get(file.name, 0)
            if missing := {name for name, length in lengths.items() if length} - {file.name for file in files}:
                raise DamagedState(f"{self._directory / min(missing)} is missing, {first.name} counts on it")
        return limits

    def _first_line(self, file: JournalFile) -> Line | None:
        try:
            unit = next(self._units(file, self._size(file)), None)
        except DamagedState:
            return None
        return unit.lines[0] if unit and unit.lines else None

    def _size(self, file: JournalFile) -> int:
        with durable.reading(self._path(file)):
            return self._fs.stat(self._path(file)).size_bytes

    def _measure(self, file: JournalFile, limit: int | None, after: int, *, last: bool) -> Extent:
        size = self._size(file)
        if limit is not None and size < limit:
            raise DamagedState(f"{self._path(file)} has {size} bytes, a later epoch found {limit} in it")
        size = size if limit is None else limit
        later = self._later(file, 0, size)
        may_be_torn = limit is None and last
        return measure(self._units(file, size), self._path(file), size, after, later, may_be_torn=may_be_torn)

    def _open(self, at_least: Position | None, inspected: bool) -> None:
        if not inspected:
            self._inspect()
        if at_least is not None and not self.holds(at_least):
            raise DamagedState(
                f"{self._directory}: the {self._name} journal ends at {self.position}, "
                f"a published checkpoint knows it to {at_least}",
                hint="restore the journal from a copy; nothing was changed",
            )
        durable.make_directories(self._fs, self._directory)
        for file, extent in self._extents.items():
            if extent.torn:
                with durable.writing(self._path(file)):
                    self._fs.truncate(self._path(file), extent.bytes)
                self._extents[file] = Extent(extent.bytes, extent.bytes, extent.last_sequence)
        self._check_epoch(self._epoch - 1)
        lengths = {file.name: extent.bytes for file, extent in self._extents.items()}
        members = b'"epoch":' + jsoncodec.dumps({"number": self._epoch, "files": lengths})
        self._begin_file(JournalFile.named(self._name, self._epoch, 1, self.suffix), [(members, b"")])

    def _check_epoch(self, allowed: int) -> None:
        changed_s = self._modified_s(self._directory)
        if changed_s == self._unchanged_s:
            return
        newest = max((f.epoch for f in list_files(self._fs, self._directory, self._name, self.suffix)), default=0)
        if newest > allowed:
            raise NotAsAsked(f"{self._directory}: epoch {newest} of this run has begun, this one is {self._epoch}")
        self._unchanged_s = changed_s if self._is_past(changed_s) else None

    def _is_past(self, changed_s: float) -> bool:
        """Whether the next name in the directory is sure to give it another time than `changed_s`."""
        # Only times of the same file system are compared. One that counts whole seconds is not trusted with this.
        written_s = self._modified_s(self._path(self._current)) if self._current else 0.0
        return written_s > changed_s + _TIME_GRAIN_S and not changed_s.is_integer()

    def _modified_s(self, path: PurePath) -> float:
        with durable.reading(path):
            return self._fs.stat(path).modified_s

    def _begin_file(self, file: JournalFile, batch: list[Members]) -> None:
        path = self._path(file)
        with durable.writing(path):
            try:
                handle = self._fs.create(path)
            except FileExistsError as error:
                raise NotAsAsked(f"{path} exists: another process holds this run") from error
        sequence = self.position.sequence
        self._handle, self._current = handle, file
        self._extents[file] = Extent(0, 0, sequence)
        self._store(batch)
        durable.sync_directory(self._fs, self._directory)

    def _write(self, batch: list[Members]) -> list[int]:
        if self._broken is not None:
            raise StorageFailed(self._broken.detail)
        if self._current is None:
            raise StorageFailed(f"{self._directory}: the {self._name} journal is not open")
        self._check_epoch(self._epoch)
        if self._extents[self._current].bytes >= self._max_file_bytes:
            if self._handle is not None:
                self._handle.close()
            following = JournalFile.named(self._name, self._epoch, self._current.number + 1, self.suffix)
            first = self.position.sequence + 1
            self._begin_file(following, batch)
            return list(range(first, first + len(batch)))
        return self._store(batch)

    def _store(self, batch: list[Members]) -> list[int]:
        """Write and fsync `batch` at the end of the current file."""
        file = self._current
        assert file is not None
        extent, path = self._extents[file], self._path(file)
        synced = extent.last_sequence
        numbers = list(range(synced + 1, synced + 1 + len(batch)))
        data = self._pack(numbers, synced, batch, extent.bytes)
        try:
            with durable.writing(path):
                crash_point(BEFORE_WRITE)
                self._writer(path).write(data)
                crash_point(BEFORE_FSYNC)
            durable.sync(self._writer(path), path)
        except StorageFailed as error:
            self._broken = error
            raise
        except Exception:
            self._cut(path, extent.bytes)
            raise
        end = extent.bytes + len(data)
        self._extents[file] = Extent(end, end, numbers[-1])
        self._stored(file)
        with durable.writing(path):
            crash_point(AFTER_FSYNC)
        return numbers

    def _writer(self, path: PurePath) -> WriteHandle:
        if self._handle is None:
            self._handle = self._fs.append(path)
        return self._handle

    def _cut(self, path: PurePath, length: int) -> None:
        """Take back a partial write, so that the same can be tried again; if that fails, nothing is known any more."""
        try:
            if self._handle is not None:
                handle, self._handle = self._handle, None
                handle.close()
            self._fs.truncate(path, length)
        except OSError as error:
            self._broken = StorageFailed(f"cutting a partial write off {path} failed: {error.strerror or error}")
            raise self._broken from error
