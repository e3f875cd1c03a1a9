"""zstd frames of whole lines: checksummed, with their content size, and never believed before they are checked.

zstd readers give a torn or concatenated frame as clean short data, and without the checksum flag a flipped bit decodes
to other data. So every frame carries both, and is read with its exact extent and size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import zstandard

from gymckpt.errors import DamagedState

FRAME_BYTES = 1 << 20
"""Lines are gathered to about this much before they are compressed; a longer line has a frame of its own."""


class FrameSpan(NamedTuple):
    """Where a frame stands in its file, and how many bytes of lines it holds."""

    offset: int
    size_bytes: int
    raw_bytes: int


def gather(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of frame after frame."""
    gathered: list[bytes] = []
    size_bytes = 0
    for line in lines:
        if gathered and size_bytes + len(line) > FRAME_BYTES:
            yield b"".join(gathered)
            gathered, size_bytes = [], 0
        gathered.append(line)
        size_bytes += len(line)
    if gathered:
        yield b"".join(gathered)


def compress(lines: bytes, level: int) -> bytes:
    """One frame."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True).compress(lines)


class Compressor:
    """Makes frame after frame as `compress` does, from pieces. Blocking; one caller at a time.

    Memory that the process has never touched costs as much as a fifth of the compression, so the pieces are gathered
    in a buffer that is kept.
    """

    def __init__(self, level: int) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
        self._buffer = bytearray()

    def compress(self, pieces: Sequence[bytes], size_bytes: int) -> bytes:
        """One frame of `pieces`, which have `size_bytes` together."""
        if size_bytes > FRAME_BYTES:
            return self._compressor.compress(b"".join(pieces))
        self._buffer = self._buffer or bytearray(FRAME_BYTES)
        at = 0
        with memoryview(self._buffer) as view:
            for piece in pieces:
                view[at : at + len(piece)] = piece
                at += len(piece)
            return self._compressor.compress(view[:at])


def decompress(frame: bytes, raw_bytes: int, where: str) -> bytes:
    """The `raw_bytes` bytes in exactly one frame; anything else is `DamagedState` naming `where`."""
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size != raw_bytes or not header.has_checksum:
            raise DamagedState(f"{where}: the frame's header does not say {raw_bytes} bytes with a checksum")
        lines = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise DamagedState(f"{where}: {error}") from error
    if len(lines) != raw_bytes:
        raise DamagedState(f"{where}: {len(lines)} bytes instead of {raw_bytes}")
    return lines


_HEADER_BYTES = 18
_RLE = 1


def walk_frame(read: Callable[[int, int], bytes], offset: int, max_raw_bytes: int, where: str) -> FrameSpan | None:
    """The extent of the frame at `offset`, found by its block headers alone; None if the file ends within it.

    `read(offset, length)` gives fewer bytes at the end of the file. Nothing is decompressed, so nothing can swell.
    Raises `DamagedState` if no frame of ours begins there.
    """
    header = read(offset, _HEADER_BYTES)
    if len(header) < _HEADER_BYTES:
        return None
    try:
        facts = zstandard.get_frame_parameters(header)
        at = offset + zstandard.frame_header_size(header)
    except zstandard.ZstdError as error:
        raise DamagedState(f"{where}: {error}") from error
    if not facts.has_checksum or facts.content_size > max_raw_bytes:
        raise DamagedState(f"{where}: a frame without checksum, or of more than {max_raw_bytes} bytes")
    last = False
    while not last:
        block = read(at, 3)
        if len(block) < 3:
            return None
        fields = int.from_bytes(block, "little")
        last, kind, size = bool(fields & 1), fields >> 1 & 3, fields >> 3
        at += 3 + (1 if kind == _RLE else size)
    if len(read(at, 4)) < 4:
        return None
    return FrameSpan(offset, at + 4 - offset, facts.content_size)
