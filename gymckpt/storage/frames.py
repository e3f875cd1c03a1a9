"""zstd frames of whole lines: checksummed, with their content size, and never believed before they are checked.

zstd readers give a torn or concatenated frame as clean short data, and without the checksum flag a flipped bit decodes
to other data. So every frame carries both, and is read with its exact extent and size.
"""

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


def compress(lines: bytes, level: int) -> bytes:
    """One frame."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True).compress(lines)


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
