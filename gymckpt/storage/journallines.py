"""Lines of a journal: numbered, checksummed, and saying how much of the journal was durable when they were written.

`{"seq": 7, "synced": 5, "event": {...}, "crc32c": "1a2b3c4d"}`: the checksum covers every byte before its comma. Lines
up to `synced` had been fsynced, so a bad line at or below a later line's `synced` is damage and never a torn write.
"""

import re
from typing import Any, NamedTuple

import google_crc32c

from gymckpt import jsoncodec
from gymckpt.errors import DamagedState

_KEY = b',"crc32c":"'
_TAIL_BYTES = len(_KEY) + 8 + len(b'"}\n')
_START = re.compile(rb'\{"seq":([0-9]{1,18}),"synced":([0-9]{1,18}),')


class Line(NamedTuple):
    """A checked line: its number, how far the journal was durable, and its bytes."""

    sequence: int
    synced: int
    data: bytes

    def content(self) -> dict[str, Any]:
        """Its members."""
        content = jsoncodec.loads(self.data)
        if not isinstance(content, dict):
            raise DamagedState(f"journal line {self.sequence} is not an object")
        return content


def make_line(sequence: int, synced: int, members: bytes) -> bytes:
    """A line; `members` is `"name":<JSON>` once or more, with commas between."""
    body = b'{"seq":%d,"synced":%d,' % (sequence, synced) + members
    return body + _KEY + b"%08x" % google_crc32c.value(body) + b'"}\n'


def check_line(line: bytes) -> Line | None:
    """The line in these bytes (newline included), or None if a single bit is not as it was written."""
    body, tail = line[:-_TAIL_BYTES], line[-_TAIL_BYTES:]
    start = _START.match(body)
    if start is None or tail != _KEY + b"%08x" % google_crc32c.value(body) + b'"}\n':
        return None
    return Line(int(start[1]), int(start[2]), line)
