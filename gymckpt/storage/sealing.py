"""Small JSON files that carry the digest of their own bytes, so that no flipped bit makes another valid one of it.

The last member is `"digest"`: the SHA-256 of every byte before its comma. A digest in a file of its own could be newer
or older than what it covers.
"""

import hashlib
from typing import Any

from gymckpt import jsoncodec
from gymckpt.errors import DamagedState

_KEY = b',"digest":"'
_TAIL_BYTES = len(_KEY) + 64 + len(b'"}\n')


def seal(content: dict[str, Any]) -> bytes:
    """The bytes of a file that holds `content` (which is not empty and has no `digest`)."""
    body = jsoncodec.dumps(content)[:-1]
    return body + _KEY + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """The content of sealed bytes; raises `DamagedState` naming `where` if a single bit is not as it was written."""
    body, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    if tail != _KEY + hashlib.sha256(body).hexdigest().encode() + b'"}\n':
        raise DamagedState(f"{where}: its content does not match the digest at its end")
    try:
        content = jsoncodec.loads(body + b"}")
    except ValueError as error:
        raise DamagedState(f"{where}: {error}") from error
    if not isinstance(content, dict):
        raise DamagedState(f"{where}: not an object")
    return content
