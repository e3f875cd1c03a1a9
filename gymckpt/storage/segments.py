"""A segment file being written, and segment files being read a frame at a time."""

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath

from gymckpt.crashpoints import crash_point, declare
from gymckpt.errors import DamagedState, StorageFailed
from gymckpt.ports import FileSystem, WriteHandle
from gymckpt.storage.durable import reading, sync, temporary_name, writing
from gymckpt.storage.frames import FRAME_BYTES, Compressor, FrameSpan, decompress
from gymckpt.storage.manifest import Segment, SegmentFact
from gymckpt.storage.parts import Address, Line

BEFORE_FSYNC = declare("commit.segment.before_fsync", "the new segment is written, not yet fsynced")

_KEPT_FRAMES = 2
_KEPT_BYTES = 48 << 20


@dataclass(slots=True, eq=False)
class UnwrittenFrame:
    """Whole lines, in pieces, or what they were compressed to."""

    raw_bytes: int
    lines: Sequence[bytes] | None
    compressed: bytes = b""


class Spool:
    """A segment on its way: a temporary file that grows frame by frame, in the order of `put`.

    Several frames may be in `store` at once, each in a thread of its own; everything else is for one caller at a time.
    After an error a frame is held here, for `flush`. A write that failed is cut off and made again, so that a retry
    after a full disk stores the very same bytes. A `StorageFailed`, of a write or of a fsync, is final.
    """

    def __init__(self, fs: FileSystem, directory: PurePath, level: int) -> None:
        self._fs = fs
        self._level = level
        self._compressors: list[Compressor] = []
        self.path = temporary_name(directory / "segment")
        self._handle: WriteHandle | None = None
        self._created = False
        self._torn = False
        self._failed = False
        self._unwritten: deque[UnwrittenFrame] = deque()
        self._writing = threading.Lock()
        self._digest = hashlib.sha256()
        self.frames: list[FrameSpan] = []
        self.size_bytes = 0

    def put(self, lines: Sequence[bytes]) -> UnwrittenFrame:
        """The next frame. Pass it to `store`."""
        frame = UnwrittenFrame(sum(map(len, lines)), lines)
        self._unwritten.append(frame)
        return frame

    def store(self, frame: UnwrittenFrame) -> None:
        """Compress `frame`; write it and what waited for it, or leave that to whoever stores those before it."""
        self._compress(frame)
        self._write()

    def flush(self) -> None:
        """Compress and write what an earlier failure left."""
        for frame in tuple(self._unwritten):
            self._compress(frame)
            self._write()

    def _compress(self, frame: UnwrittenFrame) -> None:
        if frame.lines is not None:
            try:
                compressor = self._compressors.pop()
            except IndexError:
                compressor = Compressor(self._level)
            frame.compressed = compressor.compress(frame.lines, frame.raw_bytes)
            frame.lines = None
            self._compressors.append(compressor)

    def _write(self) -> None:
        with self._writing:
            while self._unwritten and self._unwritten[0].lines is None:
                frame = self._unwritten[0]
                with self._final_failures(), writing(self.path):
                    handle = self._open()
                    self._torn = True
                    handle.write(frame.compressed)
                    self._torn = False
                self._digest.update(frame.compressed)
                self.frames.append(FrameSpan(self.size_bytes, len(frame.compressed), frame.raw_bytes))
                self.size_bytes += len(frame.compressed)
                self._unwritten.popleft()

    def _open(self) -> WriteHandle:
        """The file, ending where the last frame does."""
        if self._torn:
            self.close()
        if self._handle is None and self._created:
            self._fs.truncate(self.path, self.size_bytes)
            self._handle = self._fs.append(self.path)
        elif self._handle is None:
            self._handle = self._fs.create(self.path)
            self._created = True
        return self._handle

    @contextmanager
    def _final_failures(self) -> Iterator[None]:
        """Nothing is done any more once a `StorageFailed` was raised in here: what the disk holds is not known."""
        if self._failed:
            raise StorageFailed(f"an earlier write or fsync of {self.path} failed")
        try:
            yield
        except StorageFailed:
            self._failed = True
            raise

    def finish(self) -> Segment:
        """Make it durable; what it is, by its content."""
        self.flush()
        with self._final_failures():
            if self._handle is not None:
                with writing(self.path):
                    crash_point(BEFORE_FSYNC)
                sync(self._handle, self.path)
                self.close()
        digest = self._digest.hexdigest()
        fact = SegmentFact(
            file=f"segment-{digest}.jsonl.zst",
            bytes=self.size_bytes,
            sha256=digest,
            raw_bytes=sum(frame.raw_bytes for frame in self.frames),
        )
        return Segment(fact, tuple(self.frames))

    def close(self) -> None:
        """Let go of the file."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None


class LineBuffer:
    """Lines gathered into frames, each line at an address that is known at once."""

    def __init__(self, segment: int) -> None:
        self._segment = segment
        self._lines: list[bytes] = []
        self._size_bytes = 0
        self._frame = 0
        self._ready: list[list[bytes]] = []

    def put(self, line: Line) -> Address:
        """Take `line`; where it will stand."""
        length = sum(map(len, line))
        if self._lines and self._size_bytes + length > FRAME_BYTES:
            self.seal()
        address = Address(self._segment, self._frame, self._size_bytes, length)
        self._lines += line
        self._size_bytes += length
        return address

    def seal(self) -> None:
        """End the frame, if anything is in it."""
        if self._lines:
            self._ready.append(self._lines)
            self._lines, self._size_bytes, self._frame = [], 0, self._frame + 1

    def take_ready(self) -> list[list[bytes]]:
        """Whole frames that wait to be written, each as pieces of its lines; each is given once."""
        ready, self._ready = self._ready, []
        return ready


class FrameSource:
    """Lines of segment files. Blocking; for any thread.

    Keeps the last frames that it decompressed, two for each segment: readers go forward through all segments at once,
    and memory that was used just now is a third faster to decompress into than any other. Where they do not go forward,
    each frame that is wanted again doubles that, up to 48 MiB.
    """

    def __init__(self, fs: FileSystem, directory: PurePath, segments: tuple[Segment, ...], max_raw_bytes: int) -> None:
        self._fs = fs
        self._directory = directory
        self.segments = segments
        self._max_raw_bytes = max_raw_bytes
        self._paths = [directory / segment.file for segment in segments]
        self._names = [str(path) for path in self._paths]
        self._kept: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._kept_bytes = 0
        self._most_kept = _KEPT_FRAMES * len(segments)
        self._met: set[tuple[int, int]] = set()
        self._reading = threading.Lock()

    def line(self, segment: int, frame: int, offset: int, length: int) -> memoryview:
        """One line, newline included; raises `DamagedState` naming file and frame."""
        lines, end = self.frame(segment, frame), offset + length
        if length < 1 or lines.find(b"\n", offset, end) != end - 1:
            raise DamagedState(f"{self.where(segment, frame)}: no line of {length} bytes at {offset}")
        return memoryview(lines)[offset:end]

    def frame(self, segment: int, frame: int) -> bytes:
        """All lines of one frame."""
        key = (segment, frame)
        with self._reading:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            lines = self.read_frame(segment, frame)
            if key in self._met:
                self._most_kept *= 2
            self._met.add(key)
            self._kept[key] = lines
            self._kept_bytes += len(lines)
            while len(self._kept) > self._most_kept or (self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1):
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])
            return lines

    def read_frame(self, segment: int, frame: int) -> bytes:
        """As `frame`, leaving the kept ones alone."""
        if segment >= len(self.segments) or frame >= len(self.segments[segment].frames):
            raise DamagedState(
                f"{self._directory}: the index names frame {frame} of segment {segment}, which is not there"
            )
        span, where = self.segments[segment].frames[frame], self.where(segment, frame)
        if span.raw_bytes > self._max_raw_bytes:
            raise DamagedState(
                f"{where}: {span.raw_bytes} bytes, more than the {self._max_raw_bytes} allowed",
            )
        path = self._paths[segment]
        with reading(path):
            data = self._fs.read(path, span.offset, span.size_bytes)
        if len(data) != span.size_bytes:
            raise DamagedState(f"{where}: the file ends within it")
        return decompress(data, span.raw_bytes, where)

    def where(self, segment: int, frame: int) -> str:
        """How messages name a frame."""
        return f"{self._names[segment]} frame {frame}"
