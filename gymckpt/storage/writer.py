"""Writes a participant's part of a checkpoint: spooled as it is exported, only what is new, all or nothing."""

import asyncio
import hashlib
import itertools
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

import msgspec

from gymckpt.crashpoints import crash_point, declare
from gymckpt.errors import CheckpointFailed, DamagedState, StaleCheckpoint, StorageFailed
from gymckpt.identity import EpisodeId, Kind
from gymckpt.ports import FileSystem, Offload
from gymckpt.storage import durable
from gymckpt.storage.base import Base, hold, lose
from gymckpt.storage.frames import compress, gather
from gymckpt.storage.index import header_line, index_line
from gymckpt.storage.manifest import FORMAT, MANIFEST, SCHEMA_VERSION, IndexFact, Manifest, Segment
from gymckpt.storage.merging import Merged, choose, merge
from gymckpt.storage.parts import Address, Chain, Encoded, Snapshot, encode_some, is_unchanged, take
from gymckpt.storage.prefixes import PrefixFrames
from gymckpt.storage.records import Boundary, ExportedRecord, Needs
from gymckpt.storage.segments import FrameSource, LineBuffer, Spool, UnwrittenFrame

SEGMENT_BEFORE_LINK = declare("commit.segment.before_link", "the new segment is durable under its temporary name")
MERGED_BEFORE_LINK = declare("commit.merged.before_link", "a merged segment is durable under its temporary name")
PREFIXES_BEFORE_LINK = declare("commit.prefixes.before_link", "the prefixes are durable under their temporary name")
INDEX_BEFORE_LINK = declare("commit.index.before_link", "the index is durable under its temporary name")
MANIFEST_BEFORE_LINK = declare("commit.manifest.before_link", "everything but the manifest's name is there")
MANIFEST_AFTER_LINK = declare("commit.manifest.after_link", "the manifest has its name, its directory is not fsynced")

_JOB_BYTES = 1 << 20
_JOB_RECORDS = 256
_STORED_AT_ONCE = 2
_STORED_BYTES = 4 << 20
_SPARE_BYTES = 1 << 20
_EMPTY = Chain((), {}, 0)


@dataclass(frozen=True, slots=True)
class Written:
    """A commit that is on disk."""

    manifest: dict[str, Any]
    episodes: list[EpisodeId]
    base: Base


class _Entry(msgspec.Struct, gc=False):
    """What the index says of an episode."""

    boundary: Boundary | None
    turns: int
    needs: Needs | None
    chain: Chain = _EMPTY


class ParticipantWriter:
    """One participant's records into `directory` (`<checkpoint>/gym/<kind>/<instance>`).

    `add` every record once, then `finish`. After an error `finish` may be called again and stores the very same export,
    unless a fsync failed (`StorageFailed`), which is final. Not for two callers at a time; `stop` is for any thread.
    """

    def __init__(
        self,
        fs: FileSystem,
        offload: Offload,
        directory: PurePath,
        *,
        checkpoint_id: str,
        kind: Kind,
        instance: str,
        base: Base | None = None,
        max_record_bytes: int = 1 << 30,
        compression_level: int = 1,
    ) -> None:
        self._fs = fs
        self._offload = offload
        self._directory = directory
        self._identity = (checkpoint_id, kind, instance)
        self._base = base
        self._old = base.segments if base else ()
        self._held: list[bool] | None = None
        self._max_record_bytes = max_record_bytes
        self._level = compression_level
        self._entries: dict[EpisodeId, _Entry] = {}
        self._prefixes = PrefixFrames(compression_level)
        self._pending: list[Snapshot] = []
        self._mean_bytes = _JOB_BYTES
        self._buffer = LineBuffer(len(self._old))
        self._spool = Spool(fs, directory, compression_level)
        self._storing: deque[tuple[asyncio.Task[None], int]] = deque()
        self._finishing: asyncio.Task[Written] | None = None
        self._merged: Merged | None = None
        self._merged_named = False
        self._segment: Segment | None = None
        self._segment_named = False
        self._final: tuple[tuple[Segment, ...], dict[EpisodeId, Chain]] | None = None
        self._gate = threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        """From its return on nothing new appears under a final name. Waits for a link that is being made."""
        with self._gate:
            self._stopped = True

    async def add(self, exported: ExportedRecord) -> None:
        """Take one record; what it holds is pinned before this first waits.

        Raises `CheckpointFailed` (twice the same episode, too large, not JSON), `NoSpace`, `StorageUnavailable`,
        `StorageFailed`, and `StaleCheckpoint` after `stop`.
        """
        if exported.episode in self._entries:
            raise CheckpointFailed(f"{exported.episode} was exported twice")
        entry = _Entry(exported.boundary, exported.turns, exported.needs)
        if exported.prefix is not None:
            self._prefixes.take(exported.episode, exported.prefix)
        if self._held is not None and (chain := self._known(exported.episode)) and is_unchanged(exported, chain):
            entry.chain = chain
            self._entries[exported.episode] = entry
            return
        self._pending.append(take(exported))
        self._entries[exported.episode] = entry
        if self._held is None:
            self._held = await self._offload.run(self._start)
        if len(self._pending) >= min(_JOB_RECORDS, max(1, _JOB_BYTES // self._mean_bytes)):
            await self._encode_pending()

    async def finish(self) -> Written:
        """Make it durable, the manifest last. Raises as `add` does, and `NotAsAsked` where another commit is.

        A caller that is cancelled does not stop it: the next call waits for the same work.
        """
        if self._finishing is None or (self._finishing.done() and _may_try_again(self._finishing)):
            self._finishing = asyncio.ensure_future(self._finish())
            self._finishing.add_done_callback(_retrieve)
        return await asyncio.shield(self._finishing)

    async def discard(self) -> None:
        """Remove the temporary file of a commit that is given up; what has a final name stays."""
        self.stop()
        if self._finishing is not None:
            await asyncio.wait([self._finishing])
        await self._settle()
        self._spool.close()
        await self._offload.run(lambda: durable.remove_quietly(self._fs, self._spool.path))

    # On the event loop

    def _known(self, episode: EpisodeId) -> Chain | None:
        """What can be appended to: the stored parts of the episode, up to the first that is lost."""
        chain = self._base.chains.get(episode) if self._base else None
        if chain is None or self._held is None or all(self._held):
            return chain
        kept = next((n for n, part in enumerate(chain.parts) if not self._held[part.segment]), len(chain.parts))
        return chain if kept == len(chain.parts) else chain.until(kept)

    async def _finish(self) -> Written:
        if self._held is None:
            self._held = await self._offload.run(self._start)
        await self._encode_pending()
        self._buffer.seal()
        await self._store_ready()
        await self._settle()
        return await self._offload.run(self._complete)

    async def _encode_pending(self) -> None:
        limit = self._max_record_bytes
        while self._pending:
            job = [(snapshot, self._known(snapshot.exported.episode)) for snapshot in self._pending]
            encoded = await self._offload.run(partial(encode_some, job, limit, _JOB_BYTES))
            for (snapshot, chain), result in zip(job, encoded, strict=False):
                self._place(snapshot.exported, chain, result)
            del self._pending[: len(encoded)]
            self._mean_bytes = max(1, sum(result.size_bytes for result in encoded) // len(encoded))
            await self._store_ready()

    async def _store_ready(self) -> None:
        """Have whole frames compressed and written beside the encoding of the next records; some at once."""
        for frame in [self._spool.put(lines) for lines in self._buffer.take_ready()]:
            while self._storing and not self._has_room(frame.raw_bytes):
                oldest = self._storing[0]
                await asyncio.wait([oldest[0]])
                if oldest in self._storing:
                    self._storing.remove(oldest)
                oldest[0].result()
            task = asyncio.ensure_future(self._offload.run(partial(self._store, frame)))
            task.add_done_callback(_retrieve)
            self._storing.append((task, frame.raw_bytes))

    def _has_room(self, raw_bytes: int) -> bool:
        """Whether so many bytes more may be stored at once; not while a frame that ended was not looked at."""
        return (
            not self._storing[0][0].done()
            and len(self._storing) < _STORED_AT_ONCE
            and raw_bytes + sum(size for _, size in self._storing) <= _STORED_BYTES
        )

    def _place(self, exported: ExportedRecord, chain: Chain | None, encoded: Encoded) -> None:
        entry = self._entries[exported.episode]
        if encoded.line is None:
            entry.chain = (chain or _EMPTY).same(encoded, exported.revision)
        else:
            address = self._buffer.put(encoded.line)
            entry.chain = (chain if encoded.appended and chain else _EMPTY).after(address, encoded, exported.revision)

    async def _settle(self) -> None:
        """Wait for the frames that are being stored; what failed is stored later."""
        if self._storing:
            await asyncio.wait([task for task, _ in self._storing])
            self._storing.clear()

    # In threads

    def _check(self) -> None:
        if self._stopped:
            raise StaleCheckpoint(f"checkpoint {self._identity[0]} was resumed: nothing more is written for it")

    def _name(self, temporary: PurePath, path: PurePath) -> None:
        """Give a file its final name, unless `stop` was called."""
        with self._gate:
            self._check()
            durable.name_finally(self._fs, temporary, path)

    def _start(self) -> list[bool]:
        """Make the directory, look for space, and take hold of what the last commit stored."""
        self._check()
        durable.make_directories(self._fs, self._directory)
        for directory in (self._directory.parent.parent, self._directory.parent, self._directory):
            durable.check_directory(self._fs, directory)
        expected = self._base.new_bytes if self._base else 0
        durable.check_space(self._fs, self._directory, expected + expected // 4 + _SPARE_BYTES)
        return hold(self._fs, self._base, self._directory, self._name) if self._base else []

    def _store(self, frame: UnwrittenFrame) -> None:
        self._check()
        self._spool.store(frame)

    def _complete(self) -> Written:
        """Everything after the last record. Each step is skipped if an earlier call did it."""
        self._check()
        self._spool.flush()
        self._merge()
        if self._spool.frames and self._segment is None:
            self._segment = self._spool.finish()
        if self._segment is not None and not self._segment_named:
            self._step(SEGMENT_BEFORE_LINK, self._spool.path, self._directory / self._segment.file)
            self._segment_named = True
            durable.remove_quietly(self._fs, self._spool.path)
        if self._final is None:
            self._final = self._renumber()
        segments, chains = self._final
        manifest = self._write_manifest(segments, chains)
        base = Base(self._directory, segments, chains, self._spool.size_bytes)
        return Written(manifest.model_dump(mode="json"), list(chains), base)

    def _step(self, before: str, temporary: PurePath, path: PurePath) -> None:
        with durable.writing(path):
            crash_point(before)
        self._name(temporary, path)

    def _write_manifest(self, segments: tuple[Segment, ...], chains: dict[EpisodeId, Chain]) -> Manifest:
        """The index, then what names it."""
        data, frames = self._index(segments, chains)
        digest = hashlib.sha256(data).hexdigest()
        index = IndexFact(file=f"episodes-{digest}.jsonl.zst", bytes=len(data), sha256=digest, frames=frames)
        checkpoint_id, kind, instance = self._identity
        prefixes = self._prefixes.file()
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            format=FORMAT,
            kind=kind,
            instance=instance,
            checkpoint_id=checkpoint_id,
            record_count=len(chains),
            raw_bytes=sum(part.length for chain in chains.values() for part in chain.parts),
            index=index,
            segments=[segment.fact for segment in segments],
            others=[] if prefixes is None else [prefixes[0]],
        )
        if prefixes is not None:
            self._create(PREFIXES_BEFORE_LINK, self._directory / prefixes[0].file, prefixes[1])
        self._create(INDEX_BEFORE_LINK, self._directory / index.file, data)
        durable.sync_directory(self._fs, self._directory)
        self._create(MANIFEST_BEFORE_LINK, self._directory / MANIFEST, manifest.to_bytes())
        with durable.writing(self._directory):
            crash_point(MANIFEST_AFTER_LINK)
        durable.sync_directory(self._fs, self._directory)
        return manifest

    def _create(self, before: str, path: PurePath, data: bytes) -> None:
        temporary = durable.write_temporary(self._fs, path, data)
        try:
            self._step(before, temporary, path)
        finally:
            durable.remove_quietly(self._fs, temporary)

    def _index(
        self, segments: tuple[Segment, ...], chains: dict[EpisodeId, Chain]
    ) -> tuple[bytes, list[tuple[int, int]]]:
        lines = (
            index_line(episode, entry.boundary, entry.turns, entry.needs, chain)
            for episode, chain in chains.items()
            for entry in (self._entries[episode],)
        )
        frames, sizes = [], []
        for data in gather(itertools.chain([header_line(segments)], lines)):
            frames.append(compress(data, self._level))
            sizes.append((len(frames[-1]), len(data)))
        return b"".join(frames), sizes

    def _merge(self) -> None:
        """Make one of some old segments, if there are too many or too much of one is dead."""
        if self._merged is None:
            live = [0] * (len(self._old) + 1)
            for entry in self._entries.values():
                for part in entry.chain.parts:
                    live[part.segment] += part.length
            run = choose(live[:-1], [segment.fact.raw_bytes for segment in self._old])
            if not run:
                return
            limit = self._max_record_bytes + durable.SMALL_FILE_BYTES
            source = FrameSource(self._fs, self._directory, self._old, limit)
            chains = {episode: entry.chain for episode, entry in self._entries.items()}
            self._merged = merge(
                self._fs,
                self._directory,
                self._level,
                chains,
                run,
                len(self._old) + 1,
                lambda address: self._read(source, address),
            )
        if not self._merged_named:
            self._step(MERGED_BEFORE_LINK, self._merged.temporary, self._directory / self._merged.segment.file)
            durable.remove_quietly(self._fs, self._merged.temporary)
            self._merged_named = True

    def _read(self, source: FrameSource, address: Address) -> bytes:
        try:
            return bytes(source.line(*address))
        except DamagedState as error:
            if self._base is not None:
                lose(self._base, self._old[address.segment].file, error)
            raise

    def _renumber(self) -> tuple[tuple[Segment, ...], dict[EpisodeId, Chain]]:
        """The segments that are alive, oldest first, and every address in terms of them; the other files go."""
        chains = {episode: entry.chain for episode, entry in self._entries.items()}
        if self._merged:
            chains.update(self._merged.chains)
        used = {part.segment for chain in chains.values() for part in chain.parts}
        ordered = dict(enumerate(self._old))
        if self._merged:
            for old in self._merged.run:
                del ordered[old]
            ordered[len(self._old) + 1] = self._merged.segment
        if self._segment:
            ordered[len(self._old)] = self._segment
        by_age = sorted(ordered, key=lambda n: self._merged.run.start if self._merged and n > len(self._old) else n)
        alive = [number for number in by_age if number in used]
        segments = tuple(ordered[number] for number in alive)
        numbers = {number: place for place, number in enumerate(alive)}
        kept = {segment.file for segment in segments}
        for segment in self._old if self._base and self._base.directory != self._directory else ():
            if segment.file not in kept:
                durable.remove_quietly(self._fs, self._directory / segment.file)
        if any(number != place for number, place in numbers.items()):
            for episode, chain in chains.items():
                parts = tuple(Address(numbers[part.segment], *part[1:]) for part in chain.parts)
                chains[episode] = msgspec.structs.replace(chain, parts=parts)
        return segments, chains


def _may_try_again(task: "asyncio.Task[Written]") -> bool:
    """Whether a finish that ended may run again: it failed, but no fsync did."""
    return task.cancelled() or (task.exception() is not None and not isinstance(task.exception(), StorageFailed))


def _retrieve(task: "asyncio.Task[Any]") -> None:
    """Look at a task's error, which whoever waits next raises; else asyncio reports it as forgotten."""
    if not task.cancelled():
        task.exception()
