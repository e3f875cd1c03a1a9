"""Measures storage against the plainest pipelines that do the same work on the same bytes, and prints ratios.

    python -m scripts.bench.storage [--quick] [--large] [--directory DIR]

Runs are interleaved and the median of each counts; a first round warms up and is discarded. `--large` takes the 2 GB
set. Everything is written below `--directory` (a temporary directory by default) and removed.
"""

import argparse
import asyncio
import gc
import hashlib
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import zstandard

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.ports import ThreadOffload
from gymckpt.storage.base import Base
from gymckpt.storage.files import LocalFileSystem
from gymckpt.storage.reader import ParticipantReader
from gymckpt.storage.records import Boundary, ExportedRecord, Needs, Record
from gymckpt.storage.writer import ParticipantWriter

FS = LocalFileSystem()
OFFLOAD = ThreadOffload()
POINTER = "/session/items"


def conversations(count: int, rng: random.Random) -> list[list[dict[str, Any]]]:
    """`count` conversations of 20 to 200 kB: text of common and rare words, tool calls, numbers, nulls."""
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 11))) for _ in range(20_000)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    found = []
    for _ in range(count):
        items: list[dict[str, Any]] = []
        size, wanted = 0, rng.randint(20_000, 200_000)
        while size < wanted:
            item = message(len(items), " ".join(rng.choices(words, weights, k=rng.randint(20, 400))), rng)
            size += len(orjson.dumps(item))
            items.append(item)
        found.append(items)
    return found


def message(number: int, text: str, rng: random.Random) -> dict[str, Any]:
    if number % 3 == 2:
        return {"type": "function_call_output", "call_id": f"call_{rng.getrandbits(64):x}", "output": text}
    content: dict[str, Any] = {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": None,
        "score": rng.random(),
    }
    return {
        "type": "message",
        "id": f"msg_{rng.getrandbits(64):x}",
        "role": "assistant",
        "status": None,
        "content": [content],
    }


def record(rollout: str, items: list[dict[str, Any]]) -> Record:
    episode = {"rollout_id": rollout, "attempt": 0}
    return {"episode_id": episode, "session_key": rollout, "session": {"usage": None, "items": items}, "boundary": None}


class Bench:
    """A set of conversations and a place to write them."""

    def __init__(self, directory: Path, items: list[list[dict[str, Any]]], copies: int) -> None:
        self.directory = directory
        self.items = items
        self.copies = copies
        self.commits = 0

    def records(self, without_last: int = 0) -> Iterator[tuple[str, list[dict[str, Any]], int]]:
        """(rollout, items, how many of them are there yet)."""
        for copy in range(self.copies):
            for number, items in enumerate(self.items):
                yield f"r-{copy}-{number}", items, max(1, len(items) - without_last)

    async def commit(
        self, base: Base | None = None, without_last: int = 0, changed: int = 1
    ) -> tuple[float, Base, Path]:
        """Seconds, what was written, and where. Only one episode in `changed` has what `without_last` left out."""
        self.commits += 1
        directory = self.directory / f"c{self.commits}" / "gym" / "agent" / "a"
        begun = time.perf_counter()
        writer = ParticipantWriter(
            FS, OFFLOAD, directory, checkpoint_id=f"c{self.commits}", kind="agent", instance="a", base=base
        )
        for number, (rollout, items, length) in enumerate(self.records(without_last)):
            length = len(items) if without_last and number % changed == 0 and base else length
            boundary = Boundary("invoke_agent", length, 0.0)
            lists = {POINTER: length}
            await writer.add(
                ExportedRecord(EpisodeId(rollout), record(rollout, items), boundary, length, (), length, lists)
            )
        written = await writer.finish()
        return time.perf_counter() - begun, written.base, directory

    async def plain_commit(self) -> float:
        """Serialise, `zstd -1`, sha256, write, fsync: one thread, one stream, nothing else."""
        self.commits += 1
        path = self.directory / f"plain-{self.commits}"
        begun = time.perf_counter()
        digest = hashlib.sha256()
        compressor = zstandard.ZstdCompressor(level=1, write_checksum=True).compressobj()
        with path.open("wb") as file:
            for rollout, items, _ in self.records():
                data = compressor.compress(jsoncodec.dumps(record(rollout, items)) + b"\n")
                digest.update(data)
                file.write(data)
            data = compressor.flush()
            digest.update(data)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - begun


def plain_frames(segment: Path) -> list[bytes]:
    data, frames = segment.read_bytes(), []
    while data:
        engine = zstandard.ZstdDecompressor().decompressobj()
        engine.decompress(data)
        rest = engine.unused_data
        frames.append(data[: len(data) - len(rest)])
        data = rest
    return frames


def plain_read(frames: list[bytes], path: Path, decode: bool) -> float:
    """Read the file, sha256, decompress each frame (and decode each line)."""
    begun = time.perf_counter()
    data = path.read_bytes()
    hashlib.sha256(data).hexdigest()
    at = 0
    for frame in frames:
        lines = zstandard.ZstdDecompressor().decompress(data[at : at + len(frame)])
        at += len(frame)
        if decode:
            for line in lines.split(b"\n"):
                if line:
                    orjson.loads(line)
    return time.perf_counter() - begun


async def open_reader(directory: Path) -> ParticipantReader:
    reader = ParticipantReader(FS, OFFLOAD, directory, kind="agent", instance=directory.name)
    await reader.open()
    return reader


async def raw_read(directory: Path) -> float:
    begun = time.perf_counter()
    reader = await open_reader(directory)
    for _ in reader.files.raw_lines():
        pass
    return time.perf_counter() - begun


async def decoded_read(directory: Path) -> float:
    begun = time.perf_counter()
    reader = await open_reader(directory)
    async for _ in reader.records():
        pass
    return time.perf_counter() - begun


async def interleaved(rounds: int, **runs: Callable[[], Awaitable[float]]) -> dict[str, float]:
    """The median of each after a warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, once in runs.items():
            gc.collect()
            seconds = await once()
            if turn:
                times[name].append(seconds)
    return {name: statistics.median(found) for name, found in times.items()}


def say(name: str, ours: float, plain: float, bound: str) -> None:
    print(f"{name:34} ours {ours:8.3f} s   plain {plain:8.3f} s   speed {plain / ours:5.2f} of plain   (bound {bound})")


async def timed(call: Awaitable[Any]) -> float:
    begun = time.perf_counter()
    await call
    return time.perf_counter() - begun


async def bench_set(bench: Bench, rounds: int) -> None:
    size = sum(len(orjson.dumps(record(r, i))) for r, i, _ in bench.records())
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{size / 1e6:.0f} MB of JSON, {bench.copies * len(bench.items)} conversations")

    async def full() -> float:
        seconds, _, directory = await bench.commit()
        shutil.rmtree(directory.parents[2])
        return seconds

    async def plain() -> float:
        seconds = await bench.plain_commit()
        (bench.directory / f"plain-{bench.commits}").unlink()
        return seconds

    times = await interleaved(rounds, full=full, plain=plain)
    say("full commit", times["full"], times["plain"], ">= 0.8")
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle) / 1024
    print(f"{'peak memory above idle':34} {peak:8.0f} MB   (bound 200)")

    _, base, directory = await bench.commit(without_last=1)
    stored = sum(segment.fact.bytes for segment in base.segments)
    share = sum(len(orjson.dumps(i[-1])) for n, (_, i, _) in enumerate(bench.records()) if n % 2 == 0) / size

    async def increment() -> float:
        seconds, newer, place = await bench.commit(base, without_last=1, changed=2)
        increment.new = newer.new_bytes  # type: ignore[attr-defined]
        shutil.rmtree(place.parents[2])
        return seconds

    small = (await interleaved(rounds, increment=increment))["increment"]
    new: int = increment.new  # type: ignore[attr-defined]
    print(
        f"{f'commit of {share:.1%} new':34} time {small / times['full']:.1%} of full (bound 10%), "
        f"bytes {new / stored:.1%} (bound 5%)"
    )

    segment = max(directory.glob("segment-*"), key=lambda path: path.stat().st_size)
    frames = plain_frames(segment)

    async def plain_raw() -> float:
        return plain_read(frames, segment, decode=False)

    async def plain_decoded() -> float:
        return plain_read(frames, segment, decode=True)

    reads = await interleaved(
        rounds,
        raw=lambda: raw_read(directory),
        plain_raw=plain_raw,
        decoded=lambda: decoded_read(directory),
        plain_decoded=plain_decoded,
    )
    say("verified raw reading", reads["raw"], reads["plain_raw"], ">= 0.8")
    say("decoded reading", reads["decoded"], reads["plain_decoded"], ">= 0.8")
    shutil.rmtree(directory.parents[2])


async def bench_listing(directory: Path, count: int, rounds: int) -> None:
    place = directory / "listing" / "gym" / "agent" / "listed"
    writer = ParticipantWriter(FS, OFFLOAD, place, checkpoint_id="listing", kind="agent", instance="listed")
    needs: Needs = (("agent", "agent"), ("model", "policy_model"))
    for number in range(count):
        episode = EpisodeId(f"0123abcd-{number}-0", number % 3)
        exported = {"episode_id": number, "task_digest": "d" * 64, "boundary": None}
        await writer.add(ExportedRecord(episode, exported, Boundary("invoke_agent", 12, 1.7e9), 12, needs, 1))
    await writer.finish()
    reader = await open_reader(place)
    lines = [
        line
        for frame in plain_frames(next(place.glob("episodes-*")))
        for line in zstandard.ZstdDecompressor().decompress(frame).split(b"\n")
        if line
    ]

    async def plain() -> float:
        begun = time.perf_counter()
        for line in lines:
            orjson.loads(line)
        return time.perf_counter() - begun

    async def listing() -> float:
        begun = time.perf_counter()
        again = await open_reader(place)
        for line in again.index():
            _ = line.episode, line.boundary
        return time.perf_counter() - begun

    async def walking() -> float:
        begun = time.perf_counter()
        again = await open_reader(place)
        for _ in again.index():
            pass
        return time.perf_counter() - begun

    times = await interleaved(rounds, listing=listing, walking=walking, plain=plain)
    cost = times["listing"] / times["plain"]
    print(f"{f'listing {count} episodes':34} {times['listing']:.3f} s, {cost:.2f} x parsing its lines (bound 2)")
    print(f"{'  of which opening and walking':34} {times['walking']:.3f} s, {times['walking'] / times['plain']:.2f} x")
    one = await timed(reader.record(EpisodeId(f"0123abcd-{count // 2}-0", count // 2 % 3)))
    print(f"{f'one episode out of {count}':34} {one * 1000:.1f} ms, the scan of the index included")
    shutil.rmtree(directory / "listing")


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the conversations, 3 rounds")
    parser.add_argument("--large", action="store_true", help="the 2 GB set as well")
    parser.add_argument("--directory", type=Path, help="where to write")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="gymckpt-bench-", dir=options.directory))
    try:
        items = conversations(200 if options.quick else 2000, random.Random(7))
        rounds = 3 if options.quick else 5
        await bench_set(Bench(directory, items, 1), rounds)
        if options.large:
            await bench_set(Bench(directory, items, 9), rounds)
        await bench_listing(directory, 10_000 if options.quick else 100_000, rounds)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
