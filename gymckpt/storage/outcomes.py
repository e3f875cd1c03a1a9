"""The journal of outcomes: as every journal, with payloads, in zstd frames, and an index so that a resume reads none.

`outcomes-<epoch>-<n>.jsonl.zst` holds lines `{"seq", "synced", "event", "payload", "crc32c"}`. Beside each stands
`....index.jsonl` with the same lines but `"at": [frame, frame bytes, bytes uncompressed, offset, length]` instead of
the payload. It is written after the frame is durable and never fsynced by itself: what is missing at its end, or
damaged, is read from the frames. So it can prove that a frame counted, and never that one does not exist.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any

import msgspec

from gymckpt import jsoncodec
from gymckpt.errors import DamagedState
from gymckpt.ports import FileSystem, Offload, WriteHandle
from gymckpt.storage import durable
from gymckpt.storage.frames import FRAME_BYTES, FrameSpan, compress, decompress, walk_frame
from gymckpt.storage.journal import MAX_FILE_BYTES, Journal, Members
from gymckpt.storage.journalfiles import BadUnit, JournalFile, Unit, line_units
from gymckpt.storage.journallines import Line, check_line, make_line

_LONGEST_FRAME_BYTES = 2 << 30
_ZEROS = bytes(512)
"""A run of so many zeros stands in no frame of ours: a block of the file was never written."""


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Indexed(msgspec.Struct):
    """Of a line of the index, where its payload is."""

    at: tuple[_Count, _Count, _Count, _Count, _Count]


_INDEXED = msgspec.json.Decoder(_Indexed)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload is."""

    file: str
    frame: FrameSpan
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """An event and the place of its payload."""

    sequence: int
    event: dict[str, Any]
    place: Place


class OutcomesJournal(Journal):
    """As `Journal`; `append` also takes a payload, which `replay` and `outcomes` leave where it is."""

    suffix = ".jsonl.zst"

    def __init__(
        self,
        fs: FileSystem,
        offload: Offload,
        directory: PurePath,
        name: str = "outcomes",
        *,
        epoch: int = 1,
        max_file_bytes: int = MAX_FILE_BYTES,
        compression_level: int = 1,
    ) -> None:
        super().__init__(fs, offload, directory, name, epoch=epoch, max_file_bytes=max_file_bytes)
        self._level = compression_level
        self._index_lines: list[bytes] = []
        self._index: tuple[JournalFile, WriteHandle] | None = None

    async def append(
        self,
        event: dict[str, Any],
        payload: Any = None,
        *,
        then: Callable[[int], None] = lambda number: None,
        large: bool = True,
    ) -> int:
        """As `Journal.append`. The payload is durable together with its event, never without it.

        One that is not `large` is encoded where it is: a thread would cost more than it saves.
        """

        def encode() -> tuple[bytes, bytes]:
            return b'"event":' + jsoncodec.dumps(event), b',"payload":' + jsoncodec.dumps(payload)

        return await self._group.add(await self._offload.run(encode) if large else encode(), then)

    def outcomes(self) -> Iterator[Outcome]:
        """Every event that counts, with the place of its payload. Blocking; reads no payload."""
        for file in sorted(self._extents):
            for unit in self._units(file, self._extents[file].bytes):
                for line in unit.lines:
                    content = line.content()
                    if "event" in content:
                        yield Outcome(line.sequence, content["event"], _place(file.name, line))

    async def payload(self, outcome: Outcome) -> Any:
        """The payload of one outcome; raises `DamagedState` naming file and frame."""
        return await self._offload.run(lambda: self._payload(outcome))

    async def payloads(self, outcomes: Sequence[Outcome]) -> list[Any]:
        """The payloads of many outcomes; a frame that neighbours share is read once."""

        def read() -> list[Any]:
            found: list[Any] = []
            frame: tuple[str, FrameSpan, bytes] | None = None
            for outcome in outcomes:
                place = outcome.place
                if frame is None or frame[:2] != (place.file, place.frame):
                    frame = (place.file, place.frame, self._frame(place.file, place.frame))
                found.append(self._payload_in(frame[2], outcome))
            return found

        return await self._offload.run(read)

    async def verify(self) -> None:
        """Read every frame that counts; raises `DamagedState` at the first that is not as it was written.

        Needs neither `inspect` nor `open` before.
        """
        await self._offload.run(self._verify)

    async def close(self) -> None:
        await super().close()
        if self._index is not None:
            self._index[1].close()
            self._index = None

    # Blocking

    def _payload(self, outcome: Outcome) -> Any:
        return self._payload_in(self._frame(outcome.place.file, outcome.place.frame), outcome)

    def _payload_in(self, lines: bytes, outcome: Outcome) -> Any:
        place = outcome.place
        where = f"{self._directory / place.file} frame at {place.frame.offset}"
        line = check_line(lines[place.offset : place.offset + place.length])
        if line is None or line.sequence != outcome.sequence:
            raise DamagedState(f"{where}: line {outcome.sequence} is not where the index says")
        return line.content().get("payload")

    def _verify(self) -> None:
        if not self._extents:
            self._inspect()
        for file in sorted(self._extents):
            for _ in self._frame_units(file, 0, self._extents[file].bytes):
                pass

    def _frame(self, file: str, span: FrameSpan) -> bytes:
        path = self._directory / file
        where = f"{path} frame at {span.offset}"
        if span.raw_bytes > _LONGEST_FRAME_BYTES:
            raise DamagedState(f"{where}: more than {_LONGEST_FRAME_BYTES} bytes")
        with durable.reading(path):
            data = self._fs.read(path, span.offset, span.size_bytes)
        return decompress(data, span.raw_bytes, where)

    def _units(self, file: JournalFile, limit: int) -> Iterator[Unit]:
        """One unit a frame: from the index as far as it goes, then from the frames themselves."""
        end = 0
        for unit in self._indexed(file):
            if unit.start != end or unit.end > limit:
                break
            yield unit
            end = unit.end
        if end < limit:
            yield from self._frame_units(file, end, limit)

    def _indexed(self, file: JournalFile) -> Iterator[Unit]:
        path = self._directory / _index_name(file)
        entry = durable.exists(self._fs, path)
        if entry is None or entry.kind != "file":
            return
        lines: list[Line] = []
        span: FrameSpan | None = None
        try:
            for unit in line_units(self._fs, path, entry.size_bytes):
                place = _place(file.name, unit.lines[0])
                if span is not None and place.frame != span:
                    yield Unit(span.offset, span.offset + span.size_bytes, lines)
                    lines = []
                span = place.frame
                lines.append(unit.lines[0])
        except DamagedState:
            return  # from here on the frames are read; the last frame's lines may not all be here
        if span is not None:
            yield Unit(span.offset, span.offset + span.size_bytes, lines)

    def _frame_units(self, file: JournalFile, start: int, limit: int) -> Iterator[Unit]:
        path = self._path(file)

        def read(offset: int, length: int) -> bytes:
            with durable.reading(path):
                return self._fs.read(path, offset, max(0, min(length, limit - offset)))

        while start < limit:
            where = f"{path} frame at {start}"
            try:
                span = walk_frame(read, start, _LONGEST_FRAME_BYTES, where)
                if span is None:
                    raise BadUnit(path, start, True, "its last frame is incomplete")
                lines = self._frame(file.name, span)
                yield Unit(start, start + span.size_bytes, _to_index(lines, span, where))
            except BadUnit:
                raise
            except DamagedState as error:
                raise BadUnit(path, start, _zeros(read, start, limit), error.detail) from error
            start += span.size_bytes

    def _later(self, file: JournalFile, start: int, size: int) -> Iterator[Line]:
        """What the index proves to have been durable: it is written after its frame."""
        for unit in self._indexed(file):
            for line in unit.lines:
                yield Line(line.sequence, line.sequence, line.data)

    def _pack(self, numbers: list[int], synced: int, batch: list[Members], start: int) -> bytes:
        frames: list[bytes] = []
        self._index_lines = []
        made = [
            (number, head, make_line(number, synced, head + rest))
            for number, (head, rest) in zip(numbers, batch, strict=True)
        ]
        for group in _groups(made):
            raw = b"".join(line for _, _, line in group)
            frame = compress(raw, self._level)
            span, offset = FrameSpan(start, len(frame), len(raw)), 0
            for number, head, line in group:
                self._index_lines.append(_index_line(number, synced, head, span, offset, len(line)))
                offset += len(line)
            frames.append(frame)
            start += len(frame)
        return b"".join(frames)

    def _stored(self, file: JournalFile) -> None:
        path = self._directory / _index_name(file)
        try:
            if self._index is None or self._index[0] != file:
                if self._index is not None:
                    self._index[1].fsync()
                    self._index[1].close()
                self._index = (file, self._fs.create(path))
            self._index[1].write(b"".join(self._index_lines))
        except OSError:
            # Only the index: a reader goes on from the frames. But nothing may follow a gap in it.
            self._index = (file, _Nowhere())


class _Nowhere:
    """An index that is given up."""

    def write(self, data: bytes) -> None:
        pass

    def fsync(self) -> None:
        pass

    def close(self) -> None:
        pass


def _index_name(file: JournalFile) -> str:
    return file.name.removesuffix(".jsonl.zst") + ".index.jsonl"


def _groups(made: list[tuple[int, bytes, bytes]]) -> Iterator[list[tuple[int, bytes, bytes]]]:
    """Lines (number, head, line) in groups of about a frame."""
    group: list[tuple[int, bytes, bytes]] = []
    size = 0
    for item in made:
        if group and size + len(item[2]) > FRAME_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += len(item[2])
    if group:
        yield group


def _index_line(number: int, synced: int, head: bytes, span: FrameSpan, offset: int, length: int) -> bytes:
    at = [span.offset, span.size_bytes, span.raw_bytes, offset, length]
    return make_line(number, synced, head + b',"at":' + jsoncodec.dumps(at))


def _to_index(lines: bytes, span: FrameSpan, where: str) -> list[Line]:
    """The lines of a frame as the index has them; raises `DamagedState`."""
    found: list[Line] = []
    offset = 0
    while offset < len(lines):
        end = lines.find(b"\n", offset) + 1 or len(lines)
        line = check_line(lines[offset:end])
        if line is None:
            raise DamagedState(f"{where}: a line does not match its checksum")
        content = line.content()
        name = "event" if "event" in content else "epoch"
        head = b'"%s":%s' % (name.encode(), jsoncodec.dumps(content.get(name)))
        data = _index_line(line.sequence, line.synced, head, span, offset, end - offset)
        found.append(Line(line.sequence, line.synced, data))
        offset = end
    return found


def _place(file: str, line: Line) -> Place:
    try:
        at = _read_place(line)
    except msgspec.MsgspecError as error:
        raise DamagedState(f"{file}: its index has no place for a payload: {error}") from error
    return Place(file, FrameSpan(*at[:3]), *at[3:])


def _read_place(line: Line) -> tuple[int, int, int, int, int]:
    try:
        return _INDEXED.decode(line.data).at
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # Not every line of ours is JSON for everyone: a string in it may hold half a surrogate pair.
        return msgspec.convert(line.content(), _Indexed).at


def _zeros(read: Callable[[int, int], bytes], start: int, limit: int) -> bool:
    chunk = 1 << 20
    return any(_ZEROS in read(offset, chunk + len(_ZEROS)) for offset in range(start, limit, chunk))
