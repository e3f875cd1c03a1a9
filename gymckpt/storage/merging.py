"""Keeping segments few: the smallest are merged and dead parts dropped, a bounded share per checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.storage.manifest import MAX_SEGMENTS
from gymckpt.storage.parts import Address, Chain, assemble, envelope, read_line

_MERGED_AT_ONCE = 5
_DEAD_SHARE = 2
"""A segment is written again when less than one half of it is alive."""
_BUDGET_BYTES = 4 << 20
_BUDGET_SHARE = 16
_LARGEST_FOLD_BYTES = 32 << 20
"""Parts that are larger together stay apart: folding decodes them."""


def choose(live: Mapping[int, int], raw: Sequence[int]) -> frozenset[int]:
    """Which segments to dissolve, by their live and all their bytes of lines, given that one more is being written."""
    by_size = sorted((size, segment) for segment, size in live.items() if size)
    chosen = {segment for _, segment in by_size[:_MERGED_AT_ONCE]} if len(by_size) >= MAX_SEGMENTS else set()
    budget = max(_BUDGET_BYTES, sum(live.values()) // _BUDGET_SHARE)
    for size, segment in by_size:
        if segment not in chosen and size * _DEAD_SHARE < raw[segment]:
            budget -= size
            if budget < 0:
                break
            chosen.add(segment)
    return frozenset(chosen)


def dissolve(
    chain: Chain,
    episode: EpisodeId,
    chosen: frozenset[int],
    read: Callable[[Address], bytes],
    put: Callable[[bytes], Address],
) -> Chain:
    """`chain` with every part in a `chosen` segment moved by `put`; neighbours among them become one part."""
    parts: list[Address] = []
    last_of: list[int] = []
    run: list[int] = []

    def end_run() -> None:
        if run:
            for line, last in _fold([(read(chain.parts[index]), index) for index in run], episode):
                parts.append(put(line))
                last_of.append(last)
            run.clear()

    for index, address in enumerate(chain.parts):
        if address.segment in chosen:
            run.append(index)
        else:
            end_run()
            parts.append(address)
            last_of.append(index)
    end_run()
    lists = {name: tuple(lengths[index] for index in last_of) for name, lengths in chain.lists.items()}
    return Chain(tuple(parts), lists, chain.next_part, chain.revision, chain.digest)


def _fold(lines: list[tuple[bytes, int]], episode: EpisodeId) -> list[tuple[bytes, int]]:
    """The same parts as fewer lines, each with the index of the last part in it."""
    if len(lines) == 1 or sum(len(line) for line, _ in lines) > _LARGEST_FOLD_BYTES:
        return lines
    where = f"the parts of {episode}"
    parts = [read_line(line, where) for line, _ in lines]
    last = parts[-1]
    writer = EpisodeId(episode.rollout_id, last["attempt"])
    if parts[0].get("op") == "full":
        record, exact = jsoncodec.encode(assemble((line for line, _ in lines), episode, where))
        folded = envelope(writer, last["part"], "full", exact) + b',"record":' + record + b"}\n"
    else:
        head, exact = jsoncodec.encode(last["head"])
        lists, lists_exact = jsoncodec.encode(_joined(parts))
        folded = envelope(writer, last["part"], "append", exact and lists_exact)
        folded += b',"head":' + head + b',"lists":' + lists + b"}\n"
    return [(folded, lines[-1][1])]


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {name: {"from": first["from"], "items": []} for name, first in parts[0]["lists"].items()}
    for part in parts:
        for name, addition in part["lists"].items():
            joined[name]["items"] += addition["items"]
    return joined
