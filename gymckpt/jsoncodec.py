"""JSON in and out: orjson where it is exact. Values and key order come back as they went in."""

from typing import Any

import orjson

Json = Any
"""A JSON value: dict (string keys), list, str, int, float, bool or None."""


def dumps(value: Json) -> bytes:
    """Compact JSON in UTF-8, without a newline; key order kept."""
    return orjson.dumps(value)


def loads(data: bytes | bytearray | memoryview | str) -> Json:
    """The value that `data` holds; raises `ValueError`."""
    return orjson.loads(data)


def canonical(value: Json) -> bytes:
    """Compact JSON with sorted keys, for digests."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
