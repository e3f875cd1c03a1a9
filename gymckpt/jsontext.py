"""JSON text without limits of size or depth: the slow, total half of `jsoncodec`.

Both directions use a stack of their own instead of recursion, so depth is what the caller allows.
"""

import json
import math
import re
from collections.abc import Iterator
from json.decoder import JSONDecodeError
from json.encoder import encode_basestring
from typing import Any

MAX_READ_DEPTH = 1024
"""What `parse` accepts: a little more than may be written, for the envelope that storage adds."""
MAX_INTEGER_DIGITS = 1_000_000

_CHUNK_DIGITS = 4000
"""Python converts integers of up to 4,300 digits by itself."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_HIGH_THEN_LOW = re.compile("[\ud800-\udbff](?=[\udc00-\udfff])")
_STRINGS = json.JSONDecoder()
"""Only ever asked for strings, which its scanner reads exactly, lone surrogates too."""
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"null": None, "true": True, "false": False, "NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def render(value: Any, *, max_depth: int, sort_keys: bool) -> bytes:
    """`value` as compact JSON in UTF-8; raises `ValueError` naming the path of what cannot be written."""
    out: list[str] = []
    path: list[str | int] = []
    stack: list[Iterator[tuple[str, str | int, Any]]] = []
    closers: list[str] = []

    def put(item: Any) -> None:
        if isinstance(item, (dict, list, tuple)):
            if len(stack) >= max_depth:
                raise ValueError(f"nested more than {max_depth} levels deep at {_pointer(path)}")
            if isinstance(item, dict):
                out.append("{")
                closers.append("}")
                stack.append(_members(item, sort_keys, path))
            else:
                out.append("[")
                closers.append("]")
                stack.append(_items(item))
        else:
            out.append(_scalar(item, path))

    put(value)
    while stack:
        for prefix, step, child in stack[-1]:
            out.append(prefix)
            path[len(stack) - 1 :] = [step]
            put(child)
            break
        else:
            stack.pop()
            out.append(closers.pop())
    return "".join(out).encode("utf-8", "surrogatepass")


def parse(text: str) -> Any:
    """The value of `text`; raises `ValueError`."""
    value, end = _parse(text, _skip(text, 0))
    if _skip(text, end) != len(text):
        raise JSONDecodeError("Extra data", text, end)
    return value


def _pointer(path: list[str | int]) -> str:
    """A JSON pointer; the middle of a long one is left out."""
    steps = [str(step).replace("~", "~0").replace("/", "~1")[:64] for step in path]
    if len(steps) > 12:
        steps[6:-6] = ["..."]
    return "/" + "/".join(steps)


def _items(values: Any) -> Iterator[tuple[str, int, Any]]:
    for index, child in enumerate(values):
        yield ("," if index else "", index, child)


def _members(value: dict[Any, Any], sort_keys: bool, path: list[str | int]) -> Iterator[tuple[str, str, Any]]:
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"a key that is not a string, {type(key).__name__}, in {_pointer(path)}")
    for index, key in enumerate(sorted(value) if sort_keys else value):
        yield (f"{',' if index else ''}{_string(key)}:", key, value[key])


def _scalar(value: Any, path: list[str | int]) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return _integer(int(value))
    if isinstance(value, float):
        if math.isfinite(value):
            return float.__repr__(value)
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    raise ValueError(f"not a JSON value: {type(value).__name__} at {_pointer(path)}")


def _string(value: str) -> str:
    text = encode_basestring(value)
    if value.isascii() or _SURROGATE.search(text) is None:
        return text
    # Two escapes of a pair would be read as one character: of such a pair the first stays as it is.
    kept = {match.start() for match in _HIGH_THEN_LOW.finditer(text)}
    return _SURROGATE.sub(lambda m: m.group() if m.start() in kept else f"\\u{ord(m.group()):04x}", text)


def _integer(value: int) -> str:
    if value.bit_length() <= 3 * _CHUNK_DIGITS:
        return int.__repr__(value)
    sign, rest, chunks = "-" if value < 0 else "", abs(value), []
    base = 10**_CHUNK_DIGITS
    while rest:
        rest, chunk = divmod(rest, base)
        chunks.append(str(chunk).zfill(_CHUNK_DIGITS))
        if len(chunks) * _CHUNK_DIGITS > MAX_INTEGER_DIGITS:
            raise ValueError(f"an integer of more than {MAX_INTEGER_DIGITS} digits")
    return sign + "".join(reversed(chunks)).lstrip("0")


def _to_integer(digits: str) -> int:
    if len(digits) <= _CHUNK_DIGITS:
        return int(digits)
    if len(digits) > MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer of more than {MAX_INTEGER_DIGITS} digits")
    negative, digits, value = digits.startswith("-"), digits.removeprefix("-"), 0
    for start in range(0, len(digits), _CHUNK_DIGITS):
        chunk = digits[start : start + _CHUNK_DIGITS]
        value = value * 10 ** len(chunk) + int(chunk)
    return -value if negative else value


def _scan_string(text: str, at: int) -> tuple[str, int]:
    """The string whose first character is at `at`, and where it ends after its quote."""
    value, end = _STRINGS.raw_decode(text, at - 1)
    return value, end


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _parse(text: str, at: int) -> tuple[Any, int]:
    """One value from `at`, and where it ends."""
    stack: list[dict[str, Any] | list[Any]] = []
    keys: list[str] = []
    while True:
        opened = text[at : at + 1]
        if opened in ("{", "["):
            if len(stack) >= MAX_READ_DEPTH:
                raise JSONDecodeError("nested too deep", text, at)
            container: dict[str, Any] | list[Any] = {} if opened == "{" else []
            at = _skip(text, at + 1)
            closer = "}" if opened == "{" else "]"
            if not text.startswith(closer, at):
                stack.append(container)
                at = _key(text, at, keys) if opened == "{" else at
                continue
            value: Any = container
            at += 1
        else:
            value, at = _parse_scalar(text, at)
        while stack:
            value, at, done = _attach(stack, keys, value, text, _skip(text, at))
            if not done:
                break
        else:
            return value, at


def _attach(
    stack: list[dict[str, Any] | list[Any]], keys: list[str], value: Any, text: str, at: int
) -> tuple[Any, int, bool]:
    """Put `value` into the innermost container; the container itself and True if that ends it."""
    top = stack[-1]
    if isinstance(top, dict):
        top[keys.pop()] = value
    else:
        top.append(value)
    if text.startswith(",", at):
        at = _skip(text, at + 1)
        return None, _key(text, at, keys) if isinstance(top, dict) else at, False
    if not text.startswith("}" if isinstance(top, dict) else "]", at):
        raise JSONDecodeError("Expecting ',' delimiter", text, at)
    return stack.pop(), at + 1, True


def _key(text: str, at: int, keys: list[str]) -> int:
    if not text.startswith('"', at):
        raise JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
    key, at = _scan_string(text, at + 1)
    at = _skip(text, at)
    if not text.startswith(":", at):
        raise JSONDecodeError("Expecting ':' delimiter", text, at)
    keys.append(key)
    return _skip(text, at + 1)


def _parse_scalar(text: str, at: int) -> tuple[Any, int]:
    if text.startswith('"', at):
        return _scan_string(text, at + 1)
    for word, value in _WORDS.items():
        if text.startswith(word, at):
            return value, at + len(word)
    match = _NUMBER.match(text, at)
    if match is None:
        raise JSONDecodeError("Expecting value", text, at)
    whole, fraction, exponent = match.groups()
    if fraction is None and exponent is None:
        return _to_integer(whole), match.end()
    return float(match.group()), match.end()
