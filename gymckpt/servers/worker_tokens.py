"""Tokens of the scripted engine: one to three bytes of UTF-8 each, so that an id says what it stands for.

No vocabulary and no merges: ids are stable for ever, any text has exactly one tokenisation, and ids decode without a
table. Words begin new tokens, which gives about as many tokens as a trained vocabulary would.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_WORD = re.compile(rb"\s*\S{1,8}|\s+")
_SIZES = (1, 2, 3)
_OFFSETS = {1: 0, 2: 256, 3: 256 + 65_536}
VOCABULARY_SIZE = 256 + 65_536 + 16_777_216


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token: its id, and the natural logarithm of its probability."""

    id: int
    logprob: float


def encode(text: str) -> list[int]:
    """The token ids of `text`."""
    return [
        _OFFSETS[len(piece)] + int.from_bytes(piece, "big")
        for word in _WORD.findall(text.encode("utf-8", "surrogatepass"))
        for piece in (word[start : start + 3] for start in range(0, len(word), 3))
    ]


def decode(ids: Iterable[int]) -> str:
    """The text that `ids` stand for; bytes that are no UTF-8 (a cut inside a character) show as U+FFFD."""
    data = b"".join(_bytes(token) for token in ids)
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")


def count(text: str) -> int:
    """How many tokens `text` has."""
    return sum(-(-len(word) // 3) for word in _WORD.findall(text.encode("utf-8", "surrogatepass")))


def ids_of(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens]


def _bytes(token: int) -> bytes:
    for size in reversed(_SIZES):
        if token >= _OFFSETS[size]:
            return (token - _OFFSETS[size]).to_bytes(size, "big")
    raise ValueError(f"token {token} is negative")
