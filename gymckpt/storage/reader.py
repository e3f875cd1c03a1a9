"""Reads a participant's part of a checkpoint, an episode at a time, off the event loop."""

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import PurePath

import msgspec

from gymckpt.identity import EpisodeId, Kind
from gymckpt.ports import FileSystem, Offload
from gymckpt.storage.base import Base
from gymckpt.storage.index import IndexLine
from gymckpt.storage.participantfiles import ParticipantFiles
from gymckpt.storage.prefixes import PrefixFile
from gymckpt.storage.problems import Problem
from gymckpt.storage.readahead import ReadAhead
from gymckpt.storage.records import StoredRecord
from gymckpt.storage.segments import FrameSource

_BATCH_BYTES = 1 << 19
_BATCH_RECORDS = 256
_AHEAD_BYTES = 4 << 20


class ParticipantReader:
    """What one participant stored in `directory` (`<checkpoint>/gym/<kind>/<instance>`), our form or Gym's own.

    Everything raises `DamagedState` naming file, frame or episode, or `StorageUnavailable` where a read failed that may
    work later. `open` comes first.
    """

    def __init__(
        self,
        fs: FileSystem,
        offload: Offload,
        directory: PurePath,
        *,
        kind: Kind,
        instance: str,
        max_record_bytes: int = 1 << 30,
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._max_record_bytes = max_record_bytes
        self._offload = offload
        self._files = ParticipantFiles(fs, directory, kind=kind, instance=instance, max_record_bytes=max_record_bytes)

    async def open(self) -> None:
        """Read and check the manifest and the index (their digests; not yet the segments)."""
        await self._offload.run(self._files.open)

    @property
    def files(self) -> ParticipantFiles:
        """The same, blocking."""
        return self._files

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint that the manifest says it belongs to."""
        return self._files.checkpoint_id

    @property
    def record_count(self) -> int:
        return self._files.record_count

    def index(self) -> Iterator[IndexLine]:
        """Every episode, without its payload. Blocking for as long as the lines take to parse."""
        return self._files.index()

    async def records(self, scope: Mapping[str, int] | None = None) -> AsyncGenerator[StoredRecord, None]:
        """The records in `scope` (rollout -> the highest attempt allowed; the highest not above it is given), or all.

        Checks the digest of every file first, then all of the index. A thread reads and decodes up to 4 MiB while the
        caller uses what it has; of larger records one is in memory at a time.
        """
        await self._offload.run(self._files.check_files)
        lines = await self._offload.run(lambda: self._files.chosen(scope))
        prefixes = await self._offload.run(self._files.prefixes)
        batches = (batch for some in lines for batch in _batches(some))
        ahead = ReadAhead(batches, partial(self._read_all, self._files.source(), prefixes), _AHEAD_BYTES)
        async with aclosing(ahead.results(self._offload)) as results:
            async for records in results:
                for record in records:
                    yield record

    async def record(self, episode: EpisodeId) -> StoredRecord | None:
        """One episode, reading no more than the index and its own frames; None if it is not in here."""
        return await self._offload.run(lambda: self._files.find(episode))

    def base(self, installed: Mapping[str, int] | None = None) -> Base:
        """What the next commit can append to, after these rollouts were installed from here as these attempts.

        Pass `installed` (rollout -> its new attempt) after a restore. Without it only the very attempts that are stored
        here are continued. Blocking: parses the index.
        """
        return self._files.base(installed)

    async def verify(self, *, quick: bool = False) -> list[Problem]:
        """All that is wrong, by file, frame and episode; `quick` looks at structure only. Opens by itself."""
        return await self._offload.run(lambda: self._files.verify(quick=quick))

    def _read_all(self, source: FrameSource, prefixes: PrefixFile | None, lines: list[IndexLine]) -> list[StoredRecord]:
        records = [self._files.read(source, line) for line in lines]
        if prefixes is None:
            return records
        return [msgspec.structs.replace(record, prefix=prefixes.read(record.episode)) for record in records]


def _batches(lines: Iterable[IndexLine]) -> Iterator[tuple[list[IndexLine], int]]:
    """Lines whose records are read together, and the bytes that these have."""
    batch: list[IndexLine] = []
    size = 0
    for line in lines:
        if batch and (size + line.size_bytes > _BATCH_BYTES or len(batch) == _BATCH_RECORDS):
            yield batch, size
            batch, size = [], 0
        batch.append(line)
        size += line.size_bytes
    if batch:
        yield batch, size
