"""JSON in and out: orjson where it is exact, a total codec of our own behind it. What was encoded is what comes back.

orjson writes NaN and infinities as null, reads integers beyond 64 bits as floats, and refuses lone surrogates and deep
nesting. All of these happen to real rollouts, so a value that meets one of them takes the slower way here. Its output
is JSON with the tokens `NaN`, `Infinity` and `-Infinity`; a lone surrogate is written as an escape.
"""

import json
import math
import re
import threading
from json.decoder import JSONDecodeError
from typing import Any

import msgspec
import orjson

from gymckpt.errors import UsageError
from gymckpt.jsontext import MAX_READ_DEPTH, parse, render

Json = Any
"""A JSON value: dict (string keys), list, str, int, float, bool or None."""

MAX_DEPTH = 1000
"""Containers within containers that `dumps` accepts."""

_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_LONGEST_SAFE_DIGITS = 18
"""Every integer of so many digits fits into 64 bits."""
_DIGITS = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))
_LONG_NUMBER = b"0" * (_LONGEST_SAFE_DIGITS + 1)
_PACKER = msgspec.msgpack.Encoder()
_NONFINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
_FINITE = frozenset({str, int, bool, type(None)})
_RARE = 100


class _Scratch(threading.local):
    """Memory that a thread uses again: pages that were never touched cost more than the packing."""

    def __init__(self) -> None:
        self.packed = bytearray()


_SCRATCH = _Scratch()
_KEPT_BYTES = 4 << 20


class NotJson(UsageError, ValueError):
    """A value that JSON cannot hold, or bytes that are not JSON. Names the place."""

    code = "not_json"


def dumps(value: Json) -> bytes:
    """Compact JSON in UTF-8, without a newline; key order kept.

    Raises `NotJson` with the path of what cannot be written.
    """
    return encode(value)[0]


def encode(value: Json) -> tuple[bytes, bool]:
    """As `dumps`, and whether `orjson.loads` alone gives the value back exactly."""
    try:
        data = orjson.dumps(value, option=_STRICT)
    except TypeError:
        return _render(value, sort_keys=False), False
    if b"null" in data and _holds_nonfinite(value):
        rendered = _render(value, sort_keys=False)
        return rendered, rendered == data
    return data, True


def likeness(value: Json) -> bytes:
    """As `dumps`, but NaN and infinities may stand there as null: to tell values apart, not to read them back."""
    try:
        return orjson.dumps(value, option=_STRICT)
    except TypeError:
        return _render(value, sort_keys=False)


def loads(data: bytes | bytearray | memoryview | str) -> Json:
    """The value that `data` holds; raises `NotJson` (a `ValueError`)."""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)
    if _LONG_NUMBER not in raw.translate(_DIGITS):
        try:
            return orjson.loads(raw)
        except JSONDecodeError:
            pass
    return loads_slowly(raw)


def loads_exact(data: bytes | bytearray | memoryview) -> Json:
    """The value of `data` that `encode` said is exact. For other bytes integers beyond 64 bits become floats."""
    try:
        return orjson.loads(data)
    except JSONDecodeError as error:
        raise NotJson(f"not JSON: {error}") from error


def loads_slowly(data: bytes) -> Json:
    """As `loads`, for bytes that are known not to be exact in orjson."""
    try:
        text = data.decode("utf-8", "surrogatepass")
        try:
            return json.loads(text, parse_constant=_constant)
        except (RecursionError, JSONDecodeError):
            raise
        except ValueError:  # an integer of more digits than Python converts by itself
            return parse(text)
    except RecursionError:
        return _parse_deep(data)
    except ValueError as error:
        raise NotJson(f"not JSON: {error}") from error


def canonical(value: Json) -> bytes:
    """Compact JSON with sorted keys, for digests."""
    try:
        data = orjson.dumps(value, option=_STRICT | orjson.OPT_SORT_KEYS)
    except TypeError:
        return _render(value, sort_keys=True)
    if b"null" in data and _holds_nonfinite(value):
        return _render(value, sort_keys=True)
    return data


def _constant(token: str) -> float:
    return float(token)


def _parse_deep(data: bytes) -> Json:
    try:
        return parse(data.decode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise NotJson(f"not JSON: {error} (at most {MAX_READ_DEPTH} levels)") from error


def _render(value: Json, *, sort_keys: bool) -> bytes:
    try:
        return render(value, max_depth=MAX_DEPTH, sort_keys=sort_keys)
    except ValueError as error:
        raise NotJson(str(error)) from error


def _holds_nonfinite(value: Json) -> bool:
    """Whether NaN or an infinity is in `value`: never False if one is, and True where that cannot be told.

    A walk in Python over every value would cost more than the encoding. MessagePack writes a float as CB and its eight
    bytes, highest first, at C speed, and those of every non-finite float begin with 7F or FF and a byte above EF. Only
    a value in whose bytes that stands is walked.
    """
    packed = _SCRATCH.packed
    try:
        _PACKER.encode_into(value, packed)
        if packed.find(0x7F) < 0 and packed.find(0xFF) < 0:
            return False
        return (_may_hold(packed, 0x7F) or _may_hold(packed, 0xFF)) and _finds_nonfinite(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return True
    finally:
        if len(packed) > _KEPT_BYTES:
            _SCRATCH.packed = bytearray()


def _may_hold(packed: bytearray, high: int) -> bool:
    """Whether a non-finite float that begins with the byte `high` may be in `packed`. That byte is rare in text, and
    looking for one byte is many times faster than looking for three; where it is not rare, three it is."""
    at = 0
    for _ in range(_RARE):
        at = packed.find(high, at + 1)
        if at < 0:
            return False
        if _NONFINITE.match(packed, at - 1):
            return True
    return _NONFINITE.search(packed) is not None


def _finds_nonfinite(value: Json) -> bool:
    pending = [value]
    while pending:
        item = pending.pop()
        kind = type(item)
        if kind is dict:
            pending.extend(item.values())
        elif kind is list or kind is tuple:
            pending.extend(item)
        elif kind is float:
            if not math.isfinite(item):
                return True
        elif kind not in _FINITE:
            return True
    return False
