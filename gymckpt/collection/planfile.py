"""The frozen plan on disk: zstd frames of whole lines, and an index in a skippable frame at the end.

`zstd -dc plan.jsonl.zst` gives the lines. A line begins with its task and repeat, so that a finished rollout is passed
over without reading its row; a frame whose rollouts are all finished is not even read.
"""

import functools
import hashlib
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import zstandard

from gymckpt import jsoncodec
from gymckpt.errors import DamagedState
from gymckpt.ports import FileSystem, WriteHandle
from gymckpt.storage.durable import reading

FRAME_BYTES = 1 << 20
MAX_FRAME_BYTES = 256 << 20
_SKIPPABLE = 0x184D2A5C
_HEAD = re.compile(rb'\{"task":(\d{1,12}),"repeat":(\d{1,9}),')

_NAMES = re.compile(
    rb'\{"task":\d+,"repeat":\d+,"owner":("(?:[^"\\]|\\.)*"),"agent":(null|"(?:[^"\\]|\\.)*"),'
    rb'"cohort":(null|"(?:[^"\\]|\\.)*"),'
)


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a frame lies, what it holds, and the tasks it covers (None where they do not ascend)."""

    offset: int
    length: int
    raw_bytes: int
    lines: int
    tasks: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What run.json records of the plan: enough to know it again and to trust its index."""

    bytes: int
    index_bytes: int
    index_sha256: str
    rows: int
    rollouts: int
    max_repeats: int


@dataclass(frozen=True, slots=True)
class Planned:
    """One planned rollout. `row` is still JSON text: most readers look only at the numbers."""

    task: int
    repeat: int
    line: bytes

    @property
    def name(self) -> str:
        """The agent that the row names, else the instance that it goes to; read without its row."""
        names = self._names()
        return str(jsoncodec.loads(names[1] if names[2] == b"null" else names[2]))

    @property
    def owner(self) -> str:
        """The instance that it goes to; read without its row."""
        return str(jsoncodec.loads(self._names()[1]))

    @property
    def cohort(self) -> str | None:
        """The cohort that it belongs to; read without its row."""
        found: str | None = jsoncodec.loads(self._names()[3])
        return found

    def _names(self) -> re.Match[bytes]:
        match = _NAMES.match(self.line)
        if match is None:
            raise DamagedState(f"plan: rollout {self.task}-{self.repeat} does not say where it goes")
        return match

    def content(self) -> dict[str, Any]:
        """`{"task", "repeat", "owner", "agent", "cohort", "row"}`."""
        value = jsoncodec.loads(self.line)
        if not isinstance(value, dict):
            raise DamagedState(f"plan: rollout {self.task}-{self.repeat} is not an object")
        return value


def plan_line(task: int, repeat: int, owner: str, agent: str | None, cohort: str | None, row: bytes) -> bytes:
    """A line of the plan, its row already as JSON."""
    return b'{"task":%d,"repeat":%d,%s,"row":%s}\n' % (task, repeat, _names(owner, agent, cohort), row)


@functools.lru_cache(maxsize=256)
def _names(owner: str, agent: str | None, cohort: str | None) -> bytes:
    return jsoncodec.dumps({"owner": owner, "agent": agent, "cohort": cohort})[1:-1]


class PlanWriter:
    """Writes frames to `handle` as lines come; `finish` writes the index. Blocking, memory of one frame."""

    def __init__(self, handle: WriteHandle) -> None:
        self._handle = handle
        self._compressor = zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=True)
        self._frames: list[list[Any]] = []
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0
        self._offset = 0
        self._tasks: list[int] = []
        self.rollouts = 0
        self.max_repeats = 0

    def add_task(self, task: int, lines: list[bytes]) -> None:
        """All repeats of one task; they stay in one frame unless they are too large for one."""
        self.rollouts += len(lines)
        self.max_repeats = max(self.max_repeats, len(lines))
        if sum(map(len, lines)) > MAX_FRAME_BYTES // 2:
            self._flush()
            for line in lines:
                self._buffer, self._buffered_bytes = [line], len(line)
                self._flush()
            return
        self._buffer += lines
        self._buffered_bytes += sum(map(len, lines))
        self._tasks.append(task)
        if self._buffered_bytes >= FRAME_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._buffer:
            return
        data = self._compressor.compress(b"".join(self._buffer))
        ascending = all(a < b for a, b in zip(self._tasks, self._tasks[1:], strict=False))
        consecutive = bool(self._tasks) and ascending and self._tasks[-1] - self._tasks[0] == len(self._tasks) - 1
        tasks = [self._tasks[0], self._tasks[-1]] if consecutive else None
        self._frames.append([self._offset, len(data), self._buffered_bytes, len(self._buffer), tasks])
        self._handle.write(data)
        self._offset += len(data)
        self._buffer, self._buffered_bytes, self._tasks = [], 0, []

    def finish(self, rows: int) -> PlanSummary:
        """Write the index; `rows` is the number of rows of the input. The caller syncs and closes."""
        self._flush()
        counts = {"rows": rows, "rollouts": self.rollouts, "max_repeats": self.max_repeats}
        index = jsoncodec.dumps({**counts, "frames": self._frames})
        self._handle.write(struct.pack("<II", _SKIPPABLE, len(index)) + index)
        return PlanSummary(self._offset + 8 + len(index), len(index), hashlib.sha256(index).hexdigest(), **counts)


class PlanReader:
    """Reads a plan that `summary` describes. Blocking. Raises `DamagedState` for anything that is not as written."""

    def __init__(self, fs: FileSystem, path: PurePath, summary: PlanSummary) -> None:
        self._fs = fs
        self._path = path
        self.summary = summary
        self.frames = self._read_index()

    def _read_index(self) -> list[Frame]:
        start = self.summary.bytes - self.summary.index_bytes
        with reading(self._path):
            size = self._fs.stat(self._path).size_bytes
            index = self._fs.read(self._path, start, self.summary.index_bytes)
        if size != self.summary.bytes or hashlib.sha256(index).hexdigest() != self.summary.index_sha256:
            raise DamagedState(f"{self._path} is not the plan that run.json describes (its index or length differs)")
        frames = jsoncodec.loads(index)["frames"]
        return [Frame(o, n, raw, lines, tuple(tasks) if tasks else None) for o, n, raw, lines, tasks in frames]

    def read_frame(self, frame: Frame, wanted: Callable[[int, int], bool]) -> Iterator[Planned]:
        """The rollouts of one frame for which `wanted(task, repeat)` holds."""
        with reading(self._path):
            data = self._fs.read(self._path, frame.offset, frame.length)
        where = f"{self._path} at byte {frame.offset}"
        if len(data) != frame.length or frame.raw_bytes > MAX_FRAME_BYTES:
            raise DamagedState(f"{where}: the frame is cut short or too large")
        try:
            parameters = zstandard.get_frame_parameters(data)
            if parameters.content_size != frame.raw_bytes or not parameters.has_checksum:
                raise DamagedState(f"{where}: the frame is not the one that was written")
            raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=frame.raw_bytes)
        except zstandard.ZstdError as error:
            raise DamagedState(f"{where}: {error}") from error
        lines = raw.split(b"\n")
        if len(raw) != frame.raw_bytes or lines.pop() or len(lines) != frame.lines:
            raise DamagedState(f"{where}: the frame does not hold {frame.lines} lines")
        for line in lines:
            head = _HEAD.match(line)
            if head is None:
                raise DamagedState(f"{where}: a line does not begin with its task and repeat")
            task, repeat = int(head[1]), int(head[2])
            if wanted(task, repeat):
                yield Planned(task, repeat, line)
