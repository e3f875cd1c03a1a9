"""Prefixes of generations that were cut: `prefixes-<sha256>.jsonl.zst` beside the segments, one line an episode.

Tokens by the thousand are worth nothing to whoever reads a record, change from checkpoint to checkpoint, and are needed
once. So they stand in a file of their own, named by the manifest: `{"rollout_id", "attempt", "prefix": {...}}`, each
line a frame of its own.
"""

import hashlib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from gymckpt import jsoncodec
from gymckpt.errors import DamagedState
from gymckpt.identity import EpisodeId
from gymckpt.ports import FileSystem
from gymckpt.storage import durable
from gymckpt.storage.frames import FrameSpan, compress, decompress, walk_frame
from gymckpt.storage.manifest import FileFact, Manifest

PREFIX = "prefixes-"


class PrefixFrames:
    """The file in the making: few and small, so they are held until the end."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._taken: list[tuple[EpisodeId, Mapping[str, Any]]] = []

    def take(self, episode: EpisodeId, prefix: Mapping[str, Any]) -> None:
        """One more line."""
        self._taken.append((episode, prefix))

    def file(self) -> tuple[FileFact, bytes] | None:
        """The file's fact and bytes, or None if there is nothing to keep; the same every time. Blocking."""
        if not self._taken:
            return None
        data = b"".join(compress(_line(episode, prefix), self._level) for episode, prefix in self._taken)
        digest = hashlib.sha256(data).hexdigest()
        return FileFact(file=f"{PREFIX}{digest}.jsonl.zst", bytes=len(data), sha256=digest), data


def _line(episode: EpisodeId, prefix: Mapping[str, Any]) -> bytes:
    line = {"rollout_id": episode.rollout_id, "attempt": episode.attempt, "prefix": dict(prefix)}
    return jsoncodec.dumps(line) + b"\n"


class PrefixFile:
    """The prefixes of one checkpoint, read one at a time. Blocking; raises `DamagedState` naming the file."""

    def __init__(self, fs: FileSystem, directory: PurePath, manifest: Manifest, max_prefix_bytes: int) -> None:
        self._spans: dict[EpisodeId, FrameSpan] = {}
        self._fs = fs
        self._path = directory
        for fact in manifest.others:
            if fact.file.startswith(PREFIX):
                self._path = directory / fact.file
                self._find(fact.bytes, max_prefix_bytes)

    def read(self, episode: EpisodeId) -> dict[str, Any] | None:
        """The episode's prefix, if it has one."""
        span = self._spans.get(episode)
        if span is None:
            return None
        prefix = self._line(span).get("prefix")
        if not isinstance(prefix, dict):
            raise DamagedState(f"{self._path}: the prefix of {episode} is not an object")
        return prefix

    def _find(self, size_bytes: int, max_prefix_bytes: int) -> None:
        offset = 0
        while offset < size_bytes:
            with durable.reading(self._path):
                span = walk_frame(
                    lambda at, length: self._fs.read(self._path, at, length), offset, max_prefix_bytes, str(self._path)
                )
            if span is None:
                raise DamagedState(f"{self._path}: it ends inside a frame")
            line = self._line(span)
            try:
                self._spans[EpisodeId(str(line["rollout_id"]), int(line["attempt"]))] = span
            except (KeyError, TypeError, ValueError) as error:
                raise DamagedState(f"{self._path} at byte {offset}: it names no episode") from error
            offset = span.offset + span.size_bytes

    def _line(self, span: FrameSpan) -> dict[str, Any]:
        where = f"{self._path} at byte {span.offset}"
        with durable.reading(self._path):
            frame = self._fs.read(self._path, span.offset, span.size_bytes)
        try:
            line = jsoncodec.loads(decompress(frame, span.raw_bytes, where))
        except ValueError as error:
            raise DamagedState(f"{where}: {error}") from error
        if not isinstance(line, dict):
            raise DamagedState(f"{where}: not a line of prefixes")
        return line
