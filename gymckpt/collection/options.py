"""How people write durations, cadences and pairs, in flags, environment and files alike."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer
from pydantic_settings import NoDecode

from gymckpt import jsoncodec

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?\Z")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_duration_s(value: Any) -> Any:
    """Seconds of `90`, `90s`, `5m`, `2h`, `1d`, `250ms`; raises `ValueError`. Numbers pass through."""
    if not isinstance(value, str):
        return value
    match = _DURATION.match(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a duration such as 30s, 5m or 2h")
    return float(match.group(1)) * _UNIT_S[match.group(2) or "s"]


def format_duration(seconds: float) -> str:
    """`seconds` in the largest unit that keeps it whole: `5m`, `90s`, `0.5s`."""
    for unit in ("d", "h", "m", "s"):
        if seconds >= _UNIT_S[unit] and seconds % _UNIT_S[unit] == 0:
            return f"{seconds / _UNIT_S[unit]:g}{unit}"
    return f"{seconds:g}s"


Duration = Annotated[float, BeforeValidator(parse_duration_s)]
"""Seconds; written as `30s`, `5m`, `2h`."""


@dataclass(frozen=True, slots=True)
class Every:
    """When a checkpoint is due: after so many seconds, after so many finished rollouts, whichever comes first.

    Both None: never by itself.
    """

    seconds: float | None = None
    episodes: int | None = None

    def __str__(self) -> str:
        parts = [format_duration(self.seconds)] if self.seconds else []
        parts += [f"{self.episodes}ep"] if self.episodes else []
        return ",".join(parts) or "off"

    @classmethod
    def parse(cls, value: Any) -> "Every":
        """Read `5m`, `200ep`, `5m,200ep` or `off`; raises `ValueError`."""
        if isinstance(value, cls):
            return value
        text = str(value).strip()
        if text == "off":
            return cls()
        seconds: float | None = None
        episodes: int | None = None
        for part in text.split(","):
            if part.strip().endswith("ep"):
                count = part.strip().removesuffix("ep")
                if episodes is not None or not count.isdecimal() or int(count) < 1:
                    raise ValueError(f"{text!r} is not a cadence such as 5m, 200ep, 5m,200ep or off")
                episodes = int(count)
            else:
                if seconds is not None:
                    raise ValueError(f"{text!r} names two durations")
                seconds = float(parse_duration_s(part))
        if seconds is not None and seconds <= 0:
            raise ValueError(f"{text!r}: a cadence must be above zero")
        return cls(seconds, episodes)


Cadence = Annotated[Every, NoDecode, BeforeValidator(Every.parse), PlainSerializer(str)]
"""`5m`, `200ep`, `5m,200ep` or `off`."""


def parse_list(value: Any) -> Any:
    """A list from `a,b` or from JSON `["a","b"]`; anything else passes through."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    return jsoncodec.loads(text) if text.startswith("[") else [part.strip() for part in text.split(",") if part.strip()]


def parse_pairs(value: Any) -> Any:
    """A mapping from `["a=1", ...]`, `a=1,b=2` or JSON; raises `ValueError` on a pair without `=` or named twice."""
    if isinstance(value, str) and value.strip().startswith("{"):
        return jsoncodec.loads(value)
    if isinstance(value, Mapping):
        return dict(value)
    pairs = parse_list(value)
    if not isinstance(pairs, list | tuple):
        return value
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, item = str(pair).partition("=")
        if not equals or not name:
            raise ValueError(f"{pair!r} is not NAME=VALUE")
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = item
    return found


def parse_repeats(value: Any) -> Any:
    """A number for all tasks, or `AGENT=N` pairs (`*=N` for the others)."""
    if isinstance(value, str) and "=" not in value and not value.strip().startswith("{"):
        return {"*": value}
    return {"*": value} if isinstance(value, int) else parse_pairs(value)


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_list)]
Pairs = Annotated[dict[str, str], NoDecode, BeforeValidator(parse_pairs)]
Counts = Annotated[dict[str, int], NoDecode, BeforeValidator(parse_pairs)]
Repeats = Annotated[dict[str, int], NoDecode, BeforeValidator(parse_repeats)]
