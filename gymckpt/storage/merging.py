"""Keeping segments few: neighbours in age are merged and dead parts dropped, a bounded share per checkpoint.

Segments stay in the order of their age, and so do the parts of an episode, so whatever is merged becomes one part. A
merge at least doubles the segment that every byte of it lies in: no byte is written again more often than the logarithm
of the number of commits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.ports import FileSystem
from gymckpt.storage import durable
from gymckpt.storage.manifest import MAX_SEGMENTS, Segment
from gymckpt.storage.parts import Address, Chain, assemble, envelope, read_line
from gymckpt.storage.segments import LineBuffer, Spool

_LARGEST_SHARE = 4
"""One commit writes no more than a fourth of everything again, unless nothing smaller would do."""
_DEAD_SHARE = 2
"""A segment is written again when less than one half of it is alive."""
_LITTLE_BYTES = 4 << 20
"""So much may always be written again."""
_LARGEST_FOLD_BYTES = 32 << 20
"""Parts that are larger together stay apart: folding decodes them."""


def choose(live: Sequence[int], raw: Sequence[int]) -> range:
    """Which segments to make one of, oldest first, by their live bytes and all their bytes of lines.

    Leaves room for one more. Segments with nothing alive do not count; the range may span some.
    """
    alive = [number for number, size in enumerate(live) if size]
    if len(alive) >= MAX_SEGMENTS:
        return _cheapest_run(alive, live)
    little = max(_LITTLE_BYTES, sum(live) // _LARGEST_SHARE)
    wasted = [
        (raw[number] - live[number], number)
        for number in alive
        if live[number] * _DEAD_SHARE < raw[number]
        and (live[number] <= little or live[number] * _LARGEST_SHARE < raw[number])
    ]
    if not wasted:
        return range(0)
    _, worst = max(wasted)
    return range(worst, worst + 1)


def _cheapest_run(alive: list[int], live: Sequence[int]) -> range:
    """The run of neighbours that costs least per segment it saves, within the share, none of them over half of it."""
    total = sum(live)
    best: tuple[tuple[bool, bool, float], range] | None = None
    for start in range(len(alive) - 1):
        size = largest = 0
        for end in range(start, len(alive)):
            size += live[alive[end]]
            largest = max(largest, live[alive[end]])
            if end == start:
                continue
            rank = (size * _LARGEST_SHARE > total, 2 * largest > size, size / (end - start))
            if best is None or rank < best[0]:
                best = (rank, range(alive[start], alive[end] + 1))
    assert best is not None
    return best[1]


@dataclass(frozen=True, slots=True)
class Merged:
    """A run of segments, as one: durable under its temporary name, with the chains that it changes."""

    run: range
    segment: Segment
    temporary: PurePath
    chains: Mapping[EpisodeId, Chain]


def merge(
    fs: FileSystem,
    directory: PurePath,
    level: int,
    chains: Mapping[EpisodeId, Chain],
    run: range,
    number: int,
    read: Callable[[Address], bytes],
) -> Merged:
    """Write everything alive in `run` into a segment of its own, provisionally numbered `number`. Blocking."""
    spool, buffer = Spool(fs, directory, level), LineBuffer(number)

    def put(line: bytes) -> Address:
        address = buffer.put((line,))
        write()
        return address

    def write() -> None:
        for lines in buffer.take_ready():
            spool.store(spool.put(lines))

    try:
        moved = {
            episode: dissolve(chain, episode, run, read, put)
            for episode, chain in chains.items()
            if any(part.segment in run for part in chain.parts)
        }
        buffer.seal()
        write()
        return Merged(run, spool.finish(), spool.path, moved)
    except BaseException:
        spool.close()
        durable.remove_quietly(fs, spool.path)
        raise


def dissolve(
    chain: Chain,
    episode: EpisodeId,
    chosen: range,
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
    return Chain(tuple(parts), lists, chain.next_part, chain.revision, chain.digest, chain.tails)


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
