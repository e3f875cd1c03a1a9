"""The ledger at size: what an append and a look-up cost as rows pile up, and what it takes of disk and memory.

    .venv/bin/python scripts/bench/ledger.py [--rows 1000000] [--rollouts 20000] [--in-flight 2000] [--at-a-time 256]

Appends go through the real file system with real fsyncs, as many at a time as given, one row after the other to each of
the rollouts in flight (20,000 of 20,000: all of them side by side from the first row to the last). Look-ups are of
rollouts chosen at random, nearly all of them out of the cache. Costs are seconds of this process's processors. The
machine's own pace varies, so every tenth is measured in turns with a small ledger that was empty when it began:
`append_ratio` and `lookup_ratio` (a row) are how much dearer the large one is.

One line of JSON for each tenth of the rows, one for reopening, one for retiring everything, and the last says how much
the last tenth differs from the first: near 1 means that nothing grows but the disk, and memory by the bytes a row.
"""

import argparse
import asyncio
import hashlib
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.ports import ThreadOffload
from gymckpt.roles.ledger import Ledger
from gymckpt.roles.ledger_rows import CallFacts, Lineage, make_row
from gymckpt.storage.files import LocalFileSystem

SAMPLES = 400
CACHE_BYTES = 1 << 20
SMALL = 8
"""The small ledger gets one batch for so many of the large one's."""


def row(number: int, key: str) -> dict[str, Any]:
    """A row of the usual size."""
    before, now = (hashlib.md5(b"%d" % n).hexdigest() for n in (number - 1, number))
    facts = CallFacts(now, number, key, Lineage("resolved", before), now + before, 1.5)
    content = [{"type": "output_text", "text": "done"}]
    said = [{"type": "message", "id": f"msg_{now}", "role": "assistant", "content": content}]
    reply = {"id": f"resp_{now}", "output": said, "usage": {"input_tokens": 900, "output_tokens": 40}}
    return make_row(facts, "/v1/responses", reply, policy_version="v1", chain=())


@dataclass
class Measured:
    """A ledger, what is written into it next, and what that cost since the last look."""

    directory: Path
    calls: Iterator[tuple[EpisodeId, int]]
    ledger: Ledger = field(init=False)
    episodes: set[EpisodeId] = field(default_factory=set)
    appended: int = 0
    append_s: float = 0.0
    looked_up: int = 0
    lookup_s: float = 0.0

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(LocalFileSystem(), ThreadOffload(), self.directory, cache_bytes=CACHE_BYTES)
        self.ledger.open()

    async def append(self, count: int) -> None:
        batch = [
            (episode, row(number, episode.capture_key))
            for _, (episode, number) in zip(range(count), self.calls, strict=False)
        ]
        self.episodes.update(episode for episode, _ in batch)
        begun_s = time.process_time()
        await asyncio.gather(*(self.ledger.append(episode, made) for episode, made in batch))
        self.append_s += time.process_time() - begun_s
        self.appended += len(batch)

    async def look_up(self, episode: EpisodeId) -> None:
        begun_s = time.process_time()
        rows = await self.ledger.rows(episode)
        self.lookup_s += time.process_time() - begun_s
        self.looked_up += len(rows)

    def costs(self) -> tuple[float, float]:
        """Microseconds of an appended and of a looked up row since the last time."""
        found = self.append_s / max(1, self.appended) * 1e6, self.lookup_s / max(1, self.looked_up) * 1e6
        self.appended = self.looked_up = 0
        self.append_s = self.lookup_s = 0.0
        return found


def calls(rows: int, rollouts: int, in_flight: int, name: str = "r") -> Iterator[tuple[EpisodeId, int]]:
    """Whose call comes next: a round of all in flight, until they have made theirs, then the next rollouts."""
    each = rows // rollouts
    for first in range(0, rollouts, in_flight):
        wave = [EpisodeId(f"{name}-{number}") for number in range(first, min(rollouts, first + in_flight))]
        for turn in range(each):
            for episode in wave:
                yield episode, turn


def state(ledger: Ledger) -> dict[str, Any]:
    return {
        "rows": ledger.row_count,
        "files": ledger.file_count,
        "disk_mb": round(ledger.disk_bytes / 1e6, 1),
        "cache_mb": round(ledger.cached_bytes / 1e6, 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def tell(**facts: Any) -> dict[str, Any]:
    rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in facts.items()}
    print(jsoncodec.dumps(rounded).decode(), flush=True)
    return facts


async def tenth(large: Measured, directory: Path, count: int, at_a_time: int, chance: random.Random) -> dict[str, Any]:
    """Append `count` rows and look some up, in turns with a small ledger."""
    small_rollouts = max(1, count // SMALL // 50)
    small = Measured(directory, calls(50 * small_rollouts, small_rollouts, small_rollouts))
    for batch in range(-(-count // at_a_time)):
        await large.append(min(at_a_time, count - batch * at_a_time))
        if batch % SMALL == 0:
            await small.append(at_a_time)
    ledgers = (large, small)
    samples = [chance.choices(sorted(one.episodes), k=SAMPLES) for one in ledgers]
    for pair in zip(*samples, strict=True):
        for one, episode in zip(ledgers, pair, strict=True):
            await one.look_up(episode)
    (append_us, lookup_us), (small_append_us, small_lookup_us) = (one.costs() for one in ledgers)
    await small.ledger.aclose()
    return {
        "append_us": append_us,
        "append_ratio": append_us / small_append_us,
        "lookup_row_us": lookup_us,
        "lookup_ratio": lookup_us / small_lookup_us,
        **state(large.ledger),
    }


async def measure(directory: Path, rows: int, rollouts: int, in_flight: int, at_a_time: int) -> None:
    chance = random.Random(1)
    large = Measured(directory / "large", calls(rows, rollouts, in_flight))
    tenths = []
    for number in range(10):
        count = rows * (number + 1) // 10 - rows * number // 10
        tenths.append(tell(**await tenth(large, directory / f"small-{number}", count, at_a_time, chance)))
    await large.ledger.aclose()
    begun_s = time.process_time()
    large.open()
    tell(reopen_row_us=(time.process_time() - begun_s) / rows * 1e6, **state(large.ledger))
    begun_s = time.process_time()
    episodes = sorted(large.episodes)
    for start in range(0, len(episodes), at_a_time):
        await asyncio.gather(*(large.ledger.retire(episode) for episode in episodes[start : start + at_a_time]))
    tell(retire_us=(time.process_time() - begun_s) / len(episodes) * 1e6, **state(large.ledger))
    await large.ledger.aclose()
    first, last = tenths[0], tenths[-1]
    tell(
        last_tenth_to_first={
            name: round(last[name] / first[name], 2)
            for name in ("append_us", "append_ratio", "lookup_row_us", "lookup_ratio", "cache_mb")
        },
        rows_a_file=last["rows"] // last["files"],
        disk_bytes_a_row=last["disk_mb"] * 1e6 / last["rows"],
        memory_bytes_a_row=(last["peak_rss_mb"] - first["peak_rss_mb"]) * 2**20 / (last["rows"] - first["rows"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--in-flight", type=int, default=2_000)
    parser.add_argument("--at-a-time", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(Path(directory), options.rows, options.rollouts, options.in_flight, options.at_a_time))


if __name__ == "__main__":
    main()
