"""The ledger at size: what an append and a look-up cost as rows pile up, and what it takes of disk and memory.

    .venv/bin/python scripts/bench/ledger.py [--rows 1000000] [--rollouts 20000] [--at-a-time 256]

Appends go through the real file system with real fsyncs, as many at a time as given. Prints one line of JSON for each
tenth of the rows, then one for reopening, and one for retiring everything.
"""

import argparse
import asyncio
import hashlib
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.ports import ThreadOffload
from gymckpt.roles.ledger import Ledger
from gymckpt.roles.ledger_rows import CallFacts, Lineage, make_row
from gymckpt.storage.files import LocalFileSystem

SAMPLES = 200


def make(directory: Path) -> Ledger:
    return Ledger(LocalFileSystem(), ThreadOffload(), directory)


def row(number: int, key: str) -> dict[str, Any]:
    """A row of the usual size."""
    before, now = (hashlib.md5(b"%d" % n).hexdigest() for n in (number - 1, number))
    facts = CallFacts(now, number, key, Lineage("resolved", before), now + before, 1.5)
    content = [{"type": "output_text", "text": "done"}]
    said = [{"type": "message", "id": f"msg_{now}", "role": "assistant", "content": content}]
    reply = {"id": f"resp_{now}", "output": said, "usage": {"input_tokens": 900, "output_tokens": 40}}
    return make_row(facts, "/v1/responses", reply, policy_version="v1", chain=())


async def look(ledger: Ledger, episodes: list[EpisodeId], chance: random.Random) -> float:
    """Median time of a look-up of a rollout that was chosen at random, in microseconds."""
    times = []
    for episode in chance.sample(episodes, min(SAMPLES, len(episodes))):
        begun_s = time.perf_counter()
        await ledger.rows(episode)
        times.append(time.perf_counter() - begun_s)
    return round(statistics.median(times) * 1e6, 1)


def state(ledger: Ledger) -> dict[str, Any]:
    return {
        "rows": ledger.row_count,
        "files": ledger.file_count,
        "disk_mb": round(ledger.disk_bytes / 1e6, 1),
        "cache_mb": round(ledger.cached_bytes / 1e6, 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


async def measure(directory: Path, rows: int, rollouts: int, at_a_time: int) -> None:
    chance = random.Random(1)
    episodes = [EpisodeId(f"r-{number}") for number in range(rollouts)]
    ledger = make(directory)
    ledger.open()
    appended = 0
    for tenth in range(1, 11):
        until = rows * tenth // 10
        begun_s, cpu_s, count = time.perf_counter(), time.process_time(), until - appended
        while appended < until:
            numbers = range(appended, min(until, appended + at_a_time))
            batch = [(episodes[number % rollouts], number) for number in numbers]
            await asyncio.gather(*(ledger.append(e, row(number, e.capture_key)) for e, number in batch))
            appended += len(batch)
        each_us = round((time.perf_counter() - begun_s) / count * 1e6, 1)
        cpu_us = round((time.process_time() - cpu_s) / count * 1e6, 1)
        result = {
            "append_us": each_us,
            "append_cpu_us": cpu_us,
            "lookup_us": await look(ledger, episodes, chance),
            **state(ledger),
        }
        print(jsoncodec.dumps(result).decode(), flush=True)
    await ledger.aclose()
    begun_s = time.perf_counter()
    ledger = make(directory)
    ledger.open()
    opened = {"reopen_s": round(time.perf_counter() - begun_s, 2), **state(ledger)}
    print(jsoncodec.dumps(opened).decode(), flush=True)
    begun_s = time.perf_counter()
    for start in range(0, rollouts, at_a_time):
        await asyncio.gather(*(ledger.retire(episode) for episode in episodes[start : start + at_a_time]))
    retired = {"retire_us": round((time.perf_counter() - begun_s) / rollouts * 1e6, 1), **state(ledger)}
    print(jsoncodec.dumps(retired).decode(), flush=True)
    await ledger.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--at-a-time", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(Path(directory) / "ledger", options.rows, options.rollouts, options.at_a_time))


if __name__ == "__main__":
    main()
