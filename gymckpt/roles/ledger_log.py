"""A log-structured file set: lines that are durable once appended, freed once dead, read back by location.

One directory, `rows-<n>.log` files, each line `<crc32c, 8 hex> <JSON>\\n`. Appends are group-committed: everything that
waits shares one write and one fsync. Space is reclaimed from the oldest file on: its live lines are appended again and
the file is removed, so the bytes on disk stay below about twice the live ones however long a server runs.

Oldest first, so that a line that frees others (a retire) can itself be dropped: nothing older than it is left.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol

import google_crc32c

from gymckpt import jsoncodec
from gymckpt.crashpoints import crash_point, declare
from gymckpt.errors import DamagedState, GymckptError, NoSpace, NotAsAsked, StorageFailed
from gymckpt.ports import FileSystem, Lock, Offload, WriteHandle
from gymckpt.storage.durable import make_directories, reading, sync, sync_directory, write_error

FILE_BYTES = 8 << 20
"""A file is closed to appends beyond this size."""
SLACK_BYTES = 16 << 20
"""Dead bytes that are not worth reclaiming."""
BATCH_LINES = 1024

BEFORE_FSYNC = declare("ledger.append.before_fsync", "ledger lines were written, not yet made durable")
AFTER_FSYNC = declare("ledger.append.after_fsync", "ledger lines are durable, nobody was told")
BEFORE_UNLINK = declare("ledger.reclaim.before_unlink", "live lines of the oldest file were appended again")

logger = logging.getLogger("gymckpt.model")

_FILE = re.compile(r"^rows-([0-9]{9})\.log\Z")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a line stands."""

    file: int
    offset: int
    length: int


class Owner(Protocol):
    """Who knows what the lines mean."""

    def recovered(self, value: Any, place: Place) -> None:
        """A line found on opening, in the order of appending."""
        ...

    def is_live(self, value: Any, place: Place) -> bool:
        """Whether the line at `place` must survive the removal of its file."""
        ...

    def moved(self, value: Any, place: Place) -> None:
        """The live line now stands at `place`."""
        ...


@dataclass(slots=True)
class _Waiting:
    line: bytes
    applied: Callable[[Place], None]
    done: "asyncio.Future[Place]"


def encode(value: Any) -> bytes:
    """One line of the log."""
    payload = jsoncodec.dumps(value)
    return b"%08x %s\n" % (google_crc32c.value(payload), payload)


def decode(line: bytes) -> Any:
    """The value of a whole line without its newline; raises `ValueError` if its checksum does not fit."""
    if len(line) < 10 or line[8:9] != b" " or int(line[:8], 16) != google_crc32c.value(line[9:]):
        raise ValueError("the checksum does not fit")
    return jsoncodec.loads(line[9:])


class LedgerLog:
    """See the module. Everything happens on the event loop, the blocking part through `offload`."""

    def __init__(self, fs: FileSystem, offload: Offload, directory: PurePath, owner: Owner) -> None:
        self._fs = fs
        self._offload = offload
        self._directory = directory
        self._owner = owner
        self._lock: Lock | None = None
        self._handle: WriteHandle | None = None
        self._current = 0
        self._sizes: dict[int, int] = {}
        self._live_bytes = 0
        self._queue: list[_Waiting] = []
        self._flusher: asyncio.Task[None] | None = None
        self._failed: GymckptError | None = None
        self._reclaims = True

    @property
    def total_bytes(self) -> int:
        """Bytes on disk."""
        return sum(self._sizes.values())

    @property
    def file_count(self) -> int:
        return len(self._sizes)

    def open(self) -> None:
        """Take the directory (made if missing) and read what is there, cutting a torn tail. Blocking.

        Raises `NotAsAsked` if another process holds it, `DamagedState` for a damaged line that is not the tail.
        """
        make_directories(self._fs, self._directory)
        try:
            self._lock = self._fs.lock(self._directory / "lock")
        except BlockingIOError:
            raise NotAsAsked(f"another process uses the ledger in {self._directory}") from None
        with reading(self._directory):
            names = [entry.name for entry in self._fs.scan(self._directory)]
        numbers = sorted(int(match.group(1)) for name in names if (match := _FILE.match(name)))
        for number in numbers:
            self._recover(number, last=number == numbers[-1])
        if numbers:
            self._current = numbers[-1]
            self._handle = self._fs.append(self._path(numbers[-1]))

    def submit(self, value: Any, applied: Callable[[Place], None]) -> "asyncio.Future[Place]":
        """Append `value`. Once it is durable, `applied` is called (in the order of submission, even if the caller has
        gone), then the future ends. It fails with `NoSpace` or `StorageFailed`: then the line is not in the log, and
        what comes later is tried in a new file."""
        waiting = _Waiting(encode(value), applied, asyncio.get_running_loop().create_future())
        waiting.done.add_done_callback(_looked_at)
        if self._failed is not None:
            waiting.done.set_exception(self._failed)
            return waiting.done
        self._queue.append(waiting)
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        return waiting.done

    def freed(self, length: int) -> None:
        """`length` bytes of lines became dead."""
        self._live_bytes -= length

    def kept(self, length: int) -> None:
        """`length` bytes of lines are live."""
        self._live_bytes += length

    async def read(self, places: Sequence[Place]) -> list[Any]:
        """The values at `places`; raises `DamagedState`, and `FileNotFoundError` if a file was reclaimed meanwhile."""
        return await self._offload.run(lambda: self._read(places))

    def _read(self, places: Sequence[Place]) -> list[Any]:
        # Rows of a rollout stand in a few files, several in each: one open for all of a file's.
        by_file: dict[int, list[Place]] = {}
        for place in places:
            by_file.setdefault(place.file, []).append(place)
        found: dict[Place, Any] = {}
        for number, standing in by_file.items():
            path = self._path(number)
            lines = self._fs.read_parts(path, [(place.offset, place.length) for place in standing])
            for place, line in zip(standing, lines, strict=True):
                try:
                    found[place] = decode(line.removesuffix(b"\n"))
                except ValueError as error:
                    raise DamagedState(f"{path} at byte {place.offset}: {error}") from error
        return [found[place] for place in places]

    async def aclose(self) -> None:
        """Wait for what was submitted, then let go of the directory."""
        if self._flusher is not None:
            await self._flusher
        if self._handle is not None:
            self._handle.close()
        if self._lock is not None:
            self._lock.release()

    def _path(self, number: int) -> PurePath:
        return self._directory / f"rows-{number:09d}.log"

    def _recover(self, number: int, *, last: bool) -> None:
        path = self._path(number)
        data = self._fs.read(path)
        good = 0
        for place, line in _lines(data, number):
            try:
                value = decode(line)
            except ValueError as error:
                # What a power cut left of the last, never acknowledged batch; anything good behind it counted.
                if last and not any(_is_whole(rest) for _, rest in _lines(data[place.offset :], number)):
                    break
                raise DamagedState(
                    f"{path} at byte {place.offset}: {error}", hint="move the ledger's directory away and start again"
                ) from error
            self._owner.recovered(value, place)
            good = place.offset + place.length
        if good < len(data):
            if not last:
                raise DamagedState(f"{path} ends inside a line, and later files exist")
            self._fs.truncate(path, good)
        self._sizes[number] = good

    async def _flush(self) -> None:
        while self._queue:
            batch, self._queue = self._queue[:BATCH_LINES], self._queue[BATCH_LINES:]
            try:
                places = await self._append([waiting.line for waiting in batch])
            except NoSpace as error:
                _refuse(batch, error)
                continue
            except (GymckptError, OSError) as error:
                named = error if isinstance(error, GymckptError) else StorageFailed(f"{self._directory}: {error}")
                await self._abandon(batch, named)
                continue
            for waiting, place in zip(batch, places, strict=True):
                waiting.applied(place)
                if not waiting.done.done():
                    waiting.done.set_result(place)
            await self._reclaim_some()

    async def _abandon(self, batch: list[_Waiting], error: GymckptError) -> None:
        """Nobody knows what reached this file beyond what was acknowledged: cut it there, and go on in another."""
        _refuse(batch, error)
        number = self._current
        try:
            if number in self._sizes and self._handle is not None:
                await self._offload.run(lambda: self._cut(self._path(number), self._sizes[number]))
        except GymckptError as again:
            self._failed = again
            _refuse(self._queue, again)
            self._queue = []
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()

    async def _reclaim_some(self) -> None:
        try:
            while self._reclaims and self.total_bytes > 2 * self._live_bytes + SLACK_BYTES and len(self._sizes) > 1:
                await self._reclaim(min(self._sizes))
        except NoSpace:
            return
        except (GymckptError, OSError, ValueError) as error:
            # Rows are safe, the space of dead ones is not coming back: better than refusing calls.
            self._reclaims = False
            logger.error("%s: space is reclaimed no longer: %s", self._directory, error)
            await self._abandon([], StorageFailed(f"{self._directory}: {error}"))

    async def _append(self, lines: list[bytes]) -> list[Place]:
        number = self._current
        start = self._sizes.get(number, FILE_BYTES)
        if self._handle is None or start >= FILE_BYTES:
            number, start = number + 1, 0
        places = []
        offset = start
        for line in lines:
            places.append(Place(number, offset, len(line)))
            offset += len(line)
        try:
            await self._offload.run(lambda: self._write(number, start, b"".join(lines)))
        finally:
            self._sizes.setdefault(self._current, 0)
        self._sizes[number] = offset
        return places

    def _write(self, number: int, start: int, data: bytes) -> None:
        path = self._path(number)
        try:
            handle = self._handle if number == self._current else None
            if handle is None:
                handle = self._begin_file(number)
            handle.write(data)
            crash_point(BEFORE_FSYNC)
        except OSError as error:
            named = write_error(error, path)
            if not isinstance(named, NoSpace):
                raise StorageFailed(named.detail) from error
            if number == self._current:
                self._cut(path, start)
                # A descriptor goes on where it was, which is behind the end now.
                handle = self._handle
                self._handle = self._fs.append(path)
                if handle is not None:
                    handle.close()
            raise named from error
        sync(handle, path)
        crash_point(AFTER_FSYNC)

    def _cut(self, path: PurePath, start: int) -> None:
        try:
            self._fs.truncate(path, start)
        except OSError as error:
            raise StorageFailed(f"{path} could not be cut back: {error}") from error

    def _begin_file(self, number: int) -> WriteHandle:
        handle = self._fs.create(self._path(number))
        if self._handle is not None:
            self._handle.close()
        self._handle, self._current = handle, number
        sync_directory(self._fs, self._directory)
        return handle

    async def _reclaim(self, number: int) -> None:
        data = await self._offload.run(lambda: self._fs.read(self._path(number)))
        live: list[tuple[Any, bytes]] = []
        for place, line in _lines(data, number):
            value = decode(line)
            if self._owner.is_live(value, place):
                live.append((value, line + b"\n"))
        if live:
            places = await self._append([line for _, line in live])
            for (value, _), place in zip(live, places, strict=True):
                self._owner.moved(value, place)
        await self._offload.run(lambda: self._remove(number))
        del self._sizes[number]

    def _remove(self, number: int) -> None:
        crash_point(BEFORE_UNLINK)
        self._fs.unlink(self._path(number))


def _is_whole(line: bytes) -> bool:
    try:
        decode(line)
    except ValueError:
        return False
    return True


def _looked_at(done: "asyncio.Future[Place]") -> None:
    # A caller that has gone reads no error; that is no reason for a warning.
    if not done.cancelled():
        done.exception()


def _refuse(batch: list[_Waiting], error: GymckptError) -> None:
    for waiting in batch:
        if not waiting.done.done():
            waiting.done.set_exception(error)


def _lines(data: bytes, number: int) -> Iterator[tuple[Place, bytes]]:
    """Every whole line with its place; what follows the last newline is left out."""
    offset = 0
    while (end := data.find(b"\n", offset)) >= 0:
        yield Place(number, offset, end + 1 - offset), data[offset:end]
        offset = end + 1
