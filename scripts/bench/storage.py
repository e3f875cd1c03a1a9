"""Measures storage against the plainest pipelines that do the same work on the same bytes; says if each bound is met.

    python -m scripts.bench.storage [--quick] [--large] [--directory DIR]

Runs are interleaved and the median of each counts; a first round warms up and is discarded. `--large` takes the 2 GB
set. Everything is written below `--directory` (a temporary directory by default) and removed.
"""

import argparse
import gc
import hashlib
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import orjson
import zstandard

from gymckpt import eventloop, jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.ports import ThreadOffload
from gymckpt.storage.base import Base
from gymckpt.storage.files import LocalFileSystem
from gymckpt.storage.frames import walk_frame
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


class CountingFileSystem(LocalFileSystem):
    """Counts what is read."""

    read_bytes = 0

    def read(self, path: PurePath, offset: int = 0, length: int = -1) -> bytes:
        data = super().read(path, offset, length)
        self.read_bytes += len(data)
        return data


class Bench:
    """A set of conversations and a place to write them."""

    def __init__(self, directory: Path, items: list[list[dict[str, Any]]], copies: int) -> None:
        directory.mkdir()
        self.directory = directory
        self.items = items
        self.copies = copies
        self.commits = 0

    def records(self, without_last: int = 0) -> Iterator[tuple[str, list[dict[str, Any]], int]]:
        """(rollout, items, how many of them are there yet)."""
        for copy in range(self.copies):
            for number, items in enumerate(self.items):
                yield f"r-{copy}-{number}", items, max(1, len(items) - without_last)

    async def commit(self, base: Base | None = None, without_last: int = 0, changed: int = 1) -> tuple[Base, Path]:
        """What was written, and where. Only one episode in `changed` has what `without_last` left out."""
        self.commits += 1
        directory = self.directory / f"c{self.commits}" / "gym" / "agent" / "a"
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
        return written.base, directory

    async def plain_commit(self) -> Path:
        """Serialise, `zstd -1`, sha256, write, fsync: one thread, one stream, nothing else."""
        self.commits += 1
        path = self.directory / f"plain-{self.commits}"
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
        return path


def plain_frames(segment: Path) -> list[bytes]:
    data, frames, at = segment.read_bytes(), list[bytes](), 0
    while span := walk_frame(lambda offset, length: data[offset : offset + length], at, 1 << 40, str(segment)):
        at += span.size_bytes
        frames.append(data[span.offset : at])
    return frames


def plain_read(frames: list[bytes], path: Path, decode: bool) -> None:
    """Read the file, sha256, decompress each frame (and decode each line)."""
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


async def open_reader(directory: Path) -> ParticipantReader:
    reader = ParticipantReader(FS, OFFLOAD, directory, kind="agent", instance=directory.name)
    await reader.open()
    return reader


async def raw_read(directory: Path) -> None:
    reader = await open_reader(directory)
    for _ in reader.files.raw_lines():
        pass


async def decoded_read(directory: Path) -> None:
    reader = await open_reader(directory)
    async for _ in reader.records():
        pass


@dataclass(frozen=True)
class Cost:
    """Seconds on the clock, and seconds of CPU in this process: on a busy machine only the second says much."""

    wall_s: float
    cpu_s: float

    def of(self, other: "Cost") -> tuple[float, float]:
        """This by the other."""
        return self.wall_s / other.wall_s, self.cpu_s / other.cpu_s


async def interleaved(rounds: int, **runs: Callable[[], Awaitable[object]]) -> dict[str, Cost]:
    """The median of each after a warm-up round. What a run gives back is called afterwards, off the clock."""
    costs: dict[str, list[Cost]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, once in runs.items():
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            tidy = await once()
            cost = Cost(time.perf_counter() - wall, time.process_time() - cpu)
            if callable(tidy):
                tidy()
            if turn:
                costs[name].append(cost)
    return {
        name: Cost(statistics.median(c.wall_s for c in found), statistics.median(c.cpu_s for c in found))
        for name, found in costs.items()
    }


def say(name: str, figures: str, met: bool, bound: str) -> None:
    print(f"{name:34} {figures:58} bound {bound}: {'met' if met else 'NOT MET'}", flush=True)


def say_speed(name: str, ours: Cost, plain: Cost) -> None:
    """Speed on the clock. Ours may use both cores, so its CPU seconds are shown but not judged."""
    wall, cpu = plain.of(ours)
    say(name, f"{ours.wall_s:.3f} s, {wall:.2f} of plain (CPU {cpu:.2f} of plain)", wall >= 0.8, ">= 0.8")


def memory_from_now() -> int:
    """Bytes resident now; the highest that `peak_memory` tells is counted from here."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """The most bytes that were resident since `memory_from_now`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def say_memory(name: str, idle_bytes: int) -> None:
    peak = (peak_memory() - idle_bytes) / 1e6
    say(name, f"{peak:.0f} MB", peak <= 200, "<= 200 MB")


async def bench_set(bench: Bench, rounds: int) -> None:
    size = sum(len(orjson.dumps(record(r, i))) for r, i, _ in bench.records())
    print(f"{size / 1e6:.0f} MB of JSON, {bench.copies * len(bench.items)} conversations")
    idle = memory_from_now()
    _, first = await bench.commit(without_last=2)
    say_memory("peak memory above idle", idle)
    shutil.rmtree(first.parents[2])
    base, directory = await bench.commit(without_last=2)
    stored = sum(segment.fact.bytes for segment in base.segments)
    share = sum(len(orjson.dumps(i[-2:])) for n, (_, i, _) in enumerate(bench.records()) if n % 2 == 0) / size
    new_bytes = 0

    async def full() -> Callable[[], None]:
        _, place = await bench.commit()
        return partial(shutil.rmtree, place.parents[2])

    async def plain() -> Callable[[], None]:
        return (await bench.plain_commit()).unlink

    async def increment() -> Callable[[], None]:
        nonlocal new_bytes
        newer, place = await bench.commit(base, without_last=2, changed=2)
        new_bytes = newer.new_bytes
        return partial(shutil.rmtree, place.parents[2])

    costs = await interleaved(rounds, full=full, plain=plain, increment=increment)
    say_speed("full commit", costs["full"], costs["plain"])
    wall, cpu = costs["increment"].of(costs["full"])
    name = f"commit of {share:.1%} new"
    say(f"{name}: time", f"{wall:.1%} of full on the clock, {cpu:.1%} CPU", max(wall, cpu) <= 0.1, "<= 10%")
    say(f"{name}: bytes", f"{new_bytes / stored:.1%} of full", new_bytes <= 0.05 * stored, "<= 5%")

    segment = max(directory.glob("segment-*"), key=lambda path: path.stat().st_size)
    frames = plain_frames(segment)

    async def plain_raw() -> None:
        plain_read(frames, segment, decode=False)

    async def plain_decoded() -> None:
        plain_read(frames, segment, decode=True)

    reads = await interleaved(
        rounds,
        raw=lambda: raw_read(directory),
        plain_raw=plain_raw,
        decoded=lambda: decoded_read(directory),
        plain_decoded=plain_decoded,
    )
    say_speed("verified raw reading", reads["raw"], reads["plain_raw"])
    say_speed("decoded reading", reads["decoded"], reads["plain_decoded"])
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
    lines = [
        line
        for frame in plain_frames(next(place.glob("episodes-*")))
        for line in zstandard.ZstdDecompressor().decompress(frame).split(b"\n")
        if line
    ]

    async def plain() -> None:
        for line in lines:
            orjson.loads(line)

    async def listing() -> None:
        again = await open_reader(place)
        for line in again.index():
            _ = line.episode, line.boundary

    costs = await interleaved(rounds, listing=listing, plain=plain)
    wall, cpu = costs["listing"].of(costs["plain"])
    figures = f"{costs['listing'].wall_s:.3f} s, {wall:.2f} x parsing its lines (CPU {cpu:.2f} x)"
    say(f"listing {count} episodes", figures, wall <= 2, "<= 2 x")
    wanted = EpisodeId(f"0123abcd-{count // 2}-0", count // 2 % 3)
    fs = CountingFileSystem()
    reader = ParticipantReader(fs, OFFLOAD, place, kind="agent", instance="listed")
    await reader.open()
    fs.read_bytes = 0
    begun = time.perf_counter()
    await reader.record(wanted)
    seconds = time.perf_counter() - begun
    line = next(line for line in reader.index() if line.episode == wanted)
    its = sum(reader.files.source().segments[p.segment].frames[p.frame].size_bytes for p in line.parts)
    figures = f"{seconds * 1000:.1f} ms, {fs.read_bytes} bytes read, its frames have {its}"
    say(f"one episode out of {count}", figures, fs.read_bytes <= its, "only its frames")
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
        await bench_set(Bench(directory / "small", items, 1), rounds)
        if options.large:
            await bench_set(Bench(directory / "large", items, 9), rounds)
        await bench_listing(directory, 10_000 if options.quick else 100_000, rounds)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(eventloop.run(main()))
