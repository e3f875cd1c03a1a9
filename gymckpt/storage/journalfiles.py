"""The files of a journal, whose they are, and how much of each counts.

Each holder of a run has an epoch and writes files of its own (`dispatch-000003-0001.jsonl`). The first line of an epoch
records the length of every older file, and what lies beyond is ignored: a holder that was stopped and wakes up late
cannot reach what the next one reads.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from gymckpt.errors import DamagedState
from gymckpt.ports import FileSystem
from gymckpt.storage import durable
from gymckpt.storage.journallines import Line, check_line

_CHUNK_BYTES = 4 << 20
_ZEROS = bytes(8)
"""No line of ours holds a NUL; a run of them is a block that was never written."""
LONGEST_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, order=True)
class JournalFile:
    """A file of a journal, in the order in which they are read."""

    epoch: int
    number: int
    name: str

    @classmethod
    def named(cls, journal: str, epoch: int, number: int, suffix: str) -> "JournalFile":
        return cls(epoch, number, f"{journal}-{epoch:06d}-{number:04d}{suffix}")


@dataclass(frozen=True, slots=True)
class Position:
    """An end of a journal: the file, how many bytes of it count, and the number of its last line."""

    file: str
    bytes: int
    sequence: int

    def __str__(self) -> str:
        return f"line {self.sequence} ({self.file}, {self.bytes} bytes)"

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "bytes": self.bytes, "sequence": self.sequence}

    @classmethod
    def from_json(cls, value: Any, where: str) -> "Position":
        """Read what `to_json` gave; raises `DamagedState`."""
        if isinstance(value, dict):
            file, size, sequence = value.get("file"), value.get("bytes"), value.get("sequence")
            if isinstance(file, str) and type(size) is int and type(sequence) is int and size >= 0 and sequence >= 0:
                return cls(file, size, sequence)
        raise DamagedState(f"{where}: not a position in a journal")


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a file is whole lines, where a torn write begins (if it has one), and its lines' numbers."""

    bytes: int
    size_bytes: int
    last_sequence: int

    @property
    def torn(self) -> bool:
        return self.size_bytes > self.bytes


@dataclass(frozen=True, slots=True)
class Unit:
    """What is written and read in one piece, a line or a frame of lines, and where it ends."""

    start: int
    end: int
    lines: list[Line]


class BadUnit(DamagedState):
    """What stands at `start` of a file is not a unit. `torn`: it may be a write that never became durable."""

    def __init__(self, path: PurePath, start: int, torn: bool, why: str) -> None:
        super().__init__(f"{path} at byte {start}: {why}")
        self.start = start
        self.torn = torn
        self.why = why


def list_files(fs: FileSystem, directory: PurePath, journal: str, suffix: str) -> list[JournalFile]:
    """The files of a journal, in order."""
    pattern = re.compile(re.escape(journal) + r"-([0-9]{6,9})-([0-9]{4,9})" + re.escape(suffix) + r"\Z")
    with durable.reading(directory):
        names = [entry.name for entry in fs.scan(directory) if entry.kind == "file"]
    matches = [(name, pattern.match(name)) for name in names]
    return sorted(JournalFile(int(match[1]), int(match[2]), name) for name, match in matches if match)


def newest_epoch(fs: FileSystem, directory: PurePath) -> int:
    """The highest epoch that any journal in `directory` has a file of; 0 if there is none. Blocking."""
    if durable.exists(fs, directory) is None:
        return 0
    with durable.reading(directory):
        names = [entry.name for entry in fs.scan(directory)]
    epochs = (re.match(r"[a-z]+-([0-9]{6,9})-[0-9]{4,9}\.", name) for name in names)
    return max((int(match[1]) for match in epochs if match), default=0)


def line_units(fs: FileSystem, path: PurePath, limit: int) -> Iterator[Unit]:
    """Each line of a plain journal file up to `limit` bytes; raises `BadUnit` at the first that is none."""
    for start, data in _split(fs, path, limit):
        line = check_line(data)
        if line is not None:
            yield Unit(start, start + len(data), [line])
        elif not data.endswith(b"\n"):
            # A whole line whose newline alone is wrong was written to its end: that is no torn write.
            whole = check_line(data[:-1] + b"\n") is not None
            raise BadUnit(
                path, start, not whole, "its last line is incomplete" if not whole else "a newline is damaged"
            )
        else:
            raise BadUnit(path, start, _ZEROS in data, "a line does not match its checksum")


def _split(fs: FileSystem, path: PurePath, limit: int) -> Iterator[tuple[int, bytes]]:
    """Lines with their newline, and a last one without."""
    rest, offset, read = b"", 0, 0
    while read < limit:
        with durable.reading(path):
            chunk = fs.read(path, read, min(_CHUNK_BYTES, limit - read))
        if not chunk:
            break
        read += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield offset, line + b"\n"
            offset += len(line) + 1
        if len(rest) > LONGEST_LINE_BYTES:
            raise DamagedState(f"{path}: a line of more than {LONGEST_LINE_BYTES} bytes at {offset}")
    if rest:
        yield offset, rest


def later_lines(fs: FileSystem, path: PurePath, start: int, size: int) -> Iterator[Line]:
    """Whatever whole lines stand after `start`, past anything unreadable."""
    for offset, data in _split(fs, path, size):
        if offset > start and (line := check_line(data)) is not None:
            yield line


def measure(
    units: Iterable[Unit], path: PurePath, size: int, after: int, later: Iterator[Line], *, may_be_torn: bool
) -> Extent:
    """How much of a file counts, whose lines must go on from number `after`.

    Raises `DamagedState` naming file and line, unless what is wrong can only be a last write that never became durable.
    """
    end, sequence = 0, after
    try:
        for unit in units:
            for line in unit.lines:
                if line.sequence != sequence + 1:
                    raise DamagedState(f"{path} at byte {unit.start}: line {line.sequence} follows line {sequence}")
                sequence = line.sequence
            end = unit.end
    except BadUnit as bad:
        counted = any(line.synced > sequence for line in later)
        if counted or not bad.torn or not may_be_torn:
            raise DamagedState(
                f"{path} line {sequence + 1} (byte {bad.start}): {bad.why}",
                hint="restore the file from a copy; nothing was changed",
            ) from bad
    return Extent(end, size, sequence)


def recorded_lengths(first: Line | None) -> Mapping[str, int] | None:
    """What the first line of an epoch says of older files, or None if it is no such line."""
    content = first.content().get("epoch") if first else None
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        return None
    return {str(name): length for name, length in files.items() if type(length) is int}
