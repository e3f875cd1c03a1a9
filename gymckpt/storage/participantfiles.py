"""A participant's files in a checkpoint, blocking: nothing in them is believed before it is checked."""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import PurePath
from typing import NamedTuple

from gymckpt.errors import DamagedState, StorageUnavailable
from gymckpt.identity import EpisodeId, Kind
from gymckpt.ports import FileSystem
from gymckpt.storage import durable
from gymckpt.storage.base import Base
from gymckpt.storage.frames import FRAME_BYTES, FrameSpan, decompress
from gymckpt.storage.index import IndexLine, find_line, read_header, read_lines
from gymckpt.storage.manifest import MANIFEST, FileFact, Manifest, Segment, read_manifest, spans
from gymckpt.storage.parts import ENVELOPE_BYTES, Chain, assemble
from gymckpt.storage.plainform import PlainForm, is_plain
from gymckpt.storage.prefixes import PrefixFile
from gymckpt.storage.problems import Problem
from gymckpt.storage.records import StoredRecord
from gymckpt.storage.segments import FrameSource

_MANIFEST_LIMIT_BYTES = 16 << 20
_CHUNK_BYTES = 8 << 20


class _CutFile(NamedTuple):
    """A file beside the index that is missing, or has another size than it was written with."""

    file: str
    error: DamagedState | StorageUnavailable
    there_bytes: int


class ParticipantFiles:
    """What one participant stored in `directory`, our form or Gym's own. `open` comes first.

    Everything raises `DamagedState` naming file, frame or episode, or `StorageUnavailable` where a read failed that may
    work later.
    """

    def __init__(
        self, fs: FileSystem, directory: PurePath, *, kind: Kind, instance: str, max_record_bytes: int = 1 << 30
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._kind = kind
        self._instance = instance
        self._max_record_bytes = max_record_bytes
        self._plain: PlainForm | None = None
        self._manifest: Manifest | None = None
        self._segments: tuple[Segment, ...] = ()
        self._index_frames: list[bytes] = []

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint that the manifest says it belongs to."""
        return self._plain.checkpoint_id if self._plain else self.manifest.checkpoint_id

    @property
    def record_count(self) -> int:
        return self._plain.record_count if self._plain else self.manifest.record_count

    @property
    def manifest(self) -> Manifest:
        """Our form's manifest; `DamagedState` for Gym's."""
        if self._manifest is None:
            raise DamagedState(f"{self._directory / MANIFEST}: not a manifest of ours, or not open")
        return self._manifest

    def prefixes(self) -> PrefixFile | None:
        """The prefixes of generations that were cut, if there are any; Gym's form has none."""
        if self._manifest is None or not self._manifest.others:
            return None
        return PrefixFile(self._fs, self._directory, self._manifest, self._max_record_bytes)

    def index(self) -> Iterator[IndexLine]:
        """Every episode, without its payload."""
        return self._plain.index() if self._plain else chain.from_iterable(self._checked_frames())

    def chosen(self, scope: Mapping[str, int] | None) -> Iterator[list[IndexLine]]:
        """Of each rollout in `scope` the line with the highest attempt not above it, in the order of the index; or all.

        Some lines at a time, and no line before the whole index was checked.
        """
        if self._plain:
            lines = list(self._plain.index())
            best = highest(lines, scope)
            return iter([[line for line in lines if is_chosen(line, best)]])
        best = highest(self.index(), scope)
        return ([line for line in lines if is_chosen(line, best)] for lines in self._frames(None))

    def _checked_frames(self) -> Iterator[list[IndexLine]]:
        seen: set[tuple[str, int]] = set()
        yield from self._frames(seen)
        if len(seen) != self.record_count:
            raise DamagedState(f"{self._index_where(0)}: {len(seen)} episodes, the manifest says {self.record_count}")

    def _frames(self, seen: set[tuple[str, int]] | None) -> Iterator[list[IndexLine]]:
        for number, lines in self._episode_lines():
            yield read_lines(lines, self._index_where(number), set() if seen is None else seen)

    @property
    def stored_bytes(self) -> int:
        """Of every file beside the manifest."""
        return self._plain.stored_bytes if self._plain else sum(fact.bytes for fact in self.manifest.files)

    @property
    def index_bytes(self) -> int:
        """Of all lines of the index."""
        return 0 if self._plain else sum(raw for _, raw in self.manifest.index.frames)

    def raw_lines(self) -> Iterator[bytes]:
        """The lines of every segment, a frame of whole lines at a time; the digest is checked at each segment's end."""
        for segment in self._segments:
            path, digest = self._directory / segment.file, hashlib.sha256()
            for frames in _read_together(segment.frames):
                first, last = segment.frames[frames.start], segment.frames[frames.stop - 1]
                with durable.reading(path):
                    data = self._fs.read(path, first.offset, last.offset + last.size_bytes - first.offset)
                digest.update(data)
                for frame in frames:
                    span = segment.frames[frame]
                    if span.raw_bytes > self._frame_limit():
                        raise DamagedState(f"{path} frame {frame}: {span.raw_bytes} bytes, more than allowed")
                    at = span.offset - first.offset
                    yield decompress(data[at : at + span.size_bytes], span.raw_bytes, f"{path} frame {frame}")
            if digest.hexdigest() != segment.fact.sha256:
                raise DamagedState(f"{path}: its bytes are not those that the manifest names")

    def base(self, installed: Mapping[str, int] | None = None) -> Base:
        """What the next commit can append to, after these rollouts were installed from here as these attempts.

        Without `installed`, only the very attempts that are stored here are continued.
        """
        chains: dict[EpisodeId, Chain] = {}
        if self._plain is None:
            scope = None if installed is None else {rollout: attempt - 1 for rollout, attempt in installed.items()}
            for line in chain.from_iterable(self.chosen(scope)):
                episode = line.episode
                now = episode.attempt if installed is None else installed[episode.rollout_id]
                chains[EpisodeId(episode.rollout_id, now)] = line.chain
        return Base(self._directory, self._segments, chains)

    def open(self, *, whole: bool = True) -> None:
        """Read and check the manifest and the index; of the files beside it only that they are there, in their sizes.

        Not `whole`: files beside the index may be missing or cut; `read` tells whom it costs.
        """
        for directory in (self._directory.parent.parent, self._directory.parent, self._directory):
            durable.check_directory(self._fs, directory)
        where = self._directory / MANIFEST
        data = durable.read_small(self._fs, where, _MANIFEST_LIMIT_BYTES)
        if is_plain(data):
            self._plain = PlainForm(self._fs, self._directory, data, self._max_record_bytes)
            self._check_owner(self._plain.kind, self._plain.instance)
        else:
            self._manifest = read_manifest(data, str(where))
            self._check_owner(self._manifest.kind, self._manifest.instance)
            self._open_index(self._manifest)
            for cut in self._cut_files() if whole else ():
                raise cut.error

    def _check_owner(self, kind: Kind, instance: str) -> None:
        if (kind, instance) != (self._kind, self._instance):
            where = self._directory / MANIFEST
            raise DamagedState(f"{where}: it is of {kind}/{instance}, not of {self._kind}/{self._instance}")

    def _open_index(self, manifest: Manifest) -> None:
        fact, path = manifest.index, self._directory / manifest.index.file
        data = durable.read_small(self._fs, path, fact.bytes)
        if len(data) != fact.bytes or hashlib.sha256(data).hexdigest() != fact.sha256:
            raise DamagedState(f"{path}: its bytes are not those that the manifest names")
        view = [data[span.offset : span.offset + span.size_bytes] for span in spans(fact.frames)]
        if not view:
            raise DamagedState(f"{path}: it has no frames")
        self._index_frames = view
        first = self._index_lines(0, view[0])
        self._segments = read_header(first[: first.find(b"\n") + 1], manifest, str(path))

    def _cut_files(self) -> Iterator["_CutFile"]:
        """The files beside the index that are not there in their sizes."""
        for fact in () if self._plain else self._beside_index():
            path, there = self._directory / fact.file, 0
            try:
                with durable.reading(path):
                    entry = self._fs.stat(path)
                there = entry.size_bytes if entry.kind == "file" else 0
                if there != fact.bytes:
                    told = f"{path}: {entry.kind} of {entry.size_bytes} bytes, the manifest says {fact.bytes}"
                    raise DamagedState(told)
            except (DamagedState, StorageUnavailable) as error:
                yield _CutFile(fact.file, error, there)

    def _index_lines(self, number: int, frame: bytes) -> bytes:
        lines = decompress(frame, self.manifest.index.frames[number][1], self._index_where(number))
        if not lines.endswith(b"\n"):
            raise DamagedState(f"{self._index_where(number)}: it does not end with a line")
        return lines

    def _index_where(self, number: int) -> str:
        return f"{self._directory / self.manifest.index.file} frame {number}"

    def check_files(self) -> None:
        """The digest of every file beside the index, which `open` checked."""
        if self._plain:
            self._plain.check()
            return
        for fact in self._beside_index():
            self.check_file(fact)

    def check_file(self, fact: FileFact) -> None:
        """`DamagedState` unless the file's bytes are those that the manifest names."""
        check_digest(self._fs, self._directory / fact.file, fact)

    def source(self) -> FrameSource:
        """The frames of this participant's segments."""
        return FrameSource(self._fs, self._directory, self._segments, self._frame_limit())

    def _frame_limit(self) -> int:
        return max(FRAME_BYTES, self._max_record_bytes) + ENVELOPE_BYTES

    def read(self, source: FrameSource, line: IndexLine) -> StoredRecord:
        """The record of one line of the index."""
        if self._plain:
            return self._plain.read(line)
        episode, parts = line.episode, line.parts
        size = sum(part.length for part in parts)
        if size != line.size_bytes:
            raise DamagedState(f"{line.where}: the parts of {episode} have {size} bytes, not {line.size_bytes}")
        if size > 2 * self._max_record_bytes + len(parts) * ENVELOPE_BYTES:
            raise DamagedState(f"{self._directory}: {episode} has more bytes than the {self._max_record_bytes} allowed")
        where = source.where(parts[-1].segment, parts[-1].frame) if parts[-1].segment < len(self._segments) else "index"
        record = assemble((source.line(*part) for part in parts), episode, where)
        return StoredRecord(episode, record, line.boundary, line.turns, line.needs)

    def verify(self, *, quick: bool) -> list[Problem]:
        """All that is wrong, by file, frame and episode; `quick` looks at structure only. Opens by itself."""
        try:
            self.open(whole=False)
            lines = self.chosen(None)
        except (DamagedState, StorageUnavailable) as error:
            return [Problem.of(error)]
        costs: dict[Problem, list[EpisodeId]] = {}
        source, cut = self.source(), {found.file: found for found in self._cut_files()}
        for line in chain.from_iterable(lines):
            try:
                _ = line.episode, line.boundary, line.turns, line.needs, line.chain, line.size_bytes
                if cut:
                    self._check_reach(line, cut)
                if not quick:
                    self.read(source, line)
            except (DamagedState, StorageUnavailable) as error:
                costs.setdefault(Problem.of(error), []).extend(_named(line))
        problems = [replace(problem, episodes=tuple(episodes)) for problem, episodes in costs.items()]
        unused = [Problem.of(found.error) for found in cut.values() if Problem.of(found.error) not in costs]
        return [*problems, *unused] if quick else [*problems, *self._damaged_files(problems)]

    def _check_reach(self, line: IndexLine, cut: Mapping[str, "_CutFile"]) -> None:
        """Raise what is wrong with a segment that does not reach as far as this episode's parts."""
        for part in line.parts:
            if part.segment < len(self._segments) and part.frame < len(self._segments[part.segment].frames):
                segment = self._segments[part.segment]
                span, found = segment.frames[part.frame], cut.get(segment.file)
                if found is not None and found.there_bytes < span.offset + span.size_bytes:
                    raise found.error

    def _damaged_files(self, known: list[Problem]) -> Iterator[Problem]:
        """Files whose digest is wrong although no frame of them was found damaged."""
        checks = [self._plain.check] if self._plain else [partial(self.check_file, f) for f in self._beside_index()]
        for check in checks:
            try:
                check()
            except (DamagedState, StorageUnavailable) as error:
                file = error.detail.split(": ")[0]
                if not any(problem.what.startswith(file) for problem in known):
                    yield Problem.of(error)

    def _beside_index(self) -> tuple[FileFact, ...]:
        return (*self.manifest.segments, *self.manifest.others)

    def find(self, episode: EpisodeId) -> StoredRecord | None:
        """One episode, reading no more than the index and its own frames; None if it is not in here."""
        if self._plain:
            found = next((line for line in self.index() if line.episode == episode), None)
            return self._plain.read(found) if found else None
        for number, lines in self._episode_lines():
            if line := find_line(lines, episode, self._index_where(number)):
                return self.read(self.source(), line)
        return None

    def _episode_lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines of each frame of the index but the first line, which is about segments."""
        for number, frame in enumerate(self._index_frames):
            lines = self._index_lines(number, frame)
            yield number, lines if number else lines[lines.index(b"\n") + 1 :]


def highest(lines: Iterable[IndexLine], scope: Mapping[str, int] | None) -> dict[str, int] | None:
    """Of each rollout in `scope` the highest attempt that `lines` have and that is not above it; None for all lines."""
    if scope is None:
        deque(lines, maxlen=0)
        return None
    best: dict[str, int] = {}
    for line in lines:
        rollout_id, attempt = line.episode
        if best.get(rollout_id, -1) < attempt <= scope.get(rollout_id, -1):
            best[rollout_id] = attempt
    return best


def is_chosen(line: IndexLine, best: Mapping[str, int] | None) -> bool:
    """Whether `best`, as `highest` gives it, names `line`."""
    return best is None or best.get(line.rollout_id) == line.attempt


def _read_together(frames: Sequence[FrameSpan]) -> Iterator[range]:
    """Runs of frames of about 8 MiB."""
    start = size = 0
    for number, frame in enumerate(frames):
        if size and size + frame.size_bytes > _CHUNK_BYTES:
            yield range(start, number)
            start, size = number, 0
        size += frame.size_bytes
    if frames:
        yield range(start, len(frames))


def check_digest(fs: FileSystem, path: PurePath, fact: FileFact) -> None:
    """`DamagedState` unless the file has the bytes and the SHA-256 of `fact`."""
    digest = hashlib.sha256()
    with durable.reading(path):
        size = fs.stat(path).size_bytes
        if size == fact.bytes:
            for offset in range(0, size, _CHUNK_BYTES):
                digest.update(fs.read(path, offset, min(_CHUNK_BYTES, size - offset)))
    if size != fact.bytes or digest.hexdigest() != fact.sha256:
        raise DamagedState(f"{path}: its {size} bytes are not those that the manifest names")


def _named(line: IndexLine) -> tuple[EpisodeId, ...]:
    try:
        return (line.episode,)
    except DamagedState:
        return ()
