"""Task rows as a stream of lines: plain, gzip or zstd files, stdin, or a bundled set. Never whole in memory."""

import hashlib
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

from gymckpt import jsoncodec
from gymckpt.errors import UsageError
from gymckpt.tasksets import task_rows

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
"""A longer line is refused: no task is that large, and a file that is not JSON lines may be one endless line."""

Chunks = Iterable[bytes]


@dataclass(frozen=True, slots=True)
class TaskInput:
    """Where rows come from. `open` may be called more than once unless it is stdin."""

    name: str
    open: Callable[[], Chunks]


def task_input(name: str) -> TaskInput:
    """The input that `--tasks` names: a file (`.gz`, `.zst` decompressed), `-`, or `@set`. Raises `UsageError`."""
    if name == "-":
        return TaskInput("stdin", lambda: _chunks(sys.stdin.buffer))
    if name.startswith("@"):
        task_rows(name)
        return TaskInput(name, lambda: (jsoncodec.dumps(row) + b"\n" for row in task_rows(name)))
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"there is no task file {name!r}", hint="give a .jsonl file, - for stdin, or a bundled @set")
    return TaskInput(name, lambda: _file_chunks(path))


def _file_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        chunks = _chunks(file)
        match path.suffix:
            case ".gz":
                yield from _decompressed(chunks, lambda: zlib.decompressobj(wbits=31), zlib.error, path)
            case ".zst":
                make = zstandard.ZstdDecompressor().decompressobj
                yield from _decompressed(chunks, make, zstandard.ZstdError, path)
            case _:
                yield from chunks


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _decompressed(
    chunks: Chunks,
    make: "Callable[[], zlib._Decompress | zstandard.ZstdDecompressionObj]",
    error: type[Exception],
    path: Path,
) -> Iterator[bytes]:
    # Both formats may be concatenated, and both readers give a torn end as clean short data: `eof` alone tells.
    decompressor = None
    try:
        for chunk in chunks:
            data = chunk
            while data:
                decompressor = decompressor or make()
                yield decompressor.decompress(data)
                if not decompressor.eof:
                    break
                data = decompressor.unused_data
                decompressor = None
    except error as problem:
        raise UsageError(f"{path}: not readable as {path.suffix[1:]}: {problem}") from problem
    if decompressor is not None:
        raise UsageError(f"{path}: the file is cut short inside a compressed part")


@dataclass(slots=True)
class Lines:
    """The lines of `chunks`, split on `\\n` alone, with their numbers from 1; blank ones are passed over.

    After the iteration `sha256` covers every byte, and `rows` counts the lines given.
    """

    chunks: Chunks
    sha256: str = ""
    rows: int = 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        digest = hashlib.sha256()
        number = 0
        rest = b""
        for chunk in self.chunks:
            digest.update(chunk)
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                number += 1
                if line.strip():
                    self.rows += 1
                    yield number, line
            if len(rest) > MAX_LINE_BYTES:
                raise UsageError(f"line {number + 1} is longer than {MAX_LINE_BYTES} bytes: is this a JSON lines file?")
        if rest.strip():
            self.rows += 1
            yield number + 1, rest
        self.sha256 = digest.hexdigest()
