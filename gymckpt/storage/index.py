"""The index: what a participant's part of a checkpoint holds, one line per episode, without any payload.

The first line is `{"segments": [{"file", "frames": [[compressed, uncompressed], ...]}, ...]}`. The others are
`{"rollout_id", "attempt", "boundary", "turns", "bytes", "needs", "parts": [[segment, frame, offset, length], ...]}`,
and what an append has to know: `"lists"` (length of each append-only list after each part), `"tails"` (digest of each
list's last item), `"digest"` (of the head), and `"next"` (number of the next part, where parts were merged).
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec

from gymckpt import jsoncodec
from gymckpt.errors import DamagedState, InvalidRolloutId
from gymckpt.identity import MAX_ATTEMPT, NAME_PATTERN, EpisodeId, Kind, check_rollout_id
from gymckpt.storage.manifest import Manifest, Segment, check_extent, spans
from gymckpt.storage.parts import Address, Chain
from gymckpt.storage.records import Boundary, Needs

_Count = Annotated[int, msgspec.Meta(ge=0)]
_NAME = NAME_PATTERN.removesuffix("$") + r"\Z"
_IS_NAME = re.compile(_NAME).match
_Parts = Annotated[tuple[tuple[_Count, _Count, _Count, _Count], ...], msgspec.Meta(min_length=1)]
_PARTS = msgspec.json.Decoder(_Parts)
_NEEDS = msgspec.json.Decoder(tuple[tuple[Kind, Annotated[str, msgspec.Meta(pattern=_NAME)]], ...] | None)
_LISTS = msgspec.json.Decoder(dict[str, tuple[_Count, ...]])
_TAILS = msgspec.json.Decoder(Mapping[str, str])
LATER: Mapping[str, msgspec.json.Decoder[Any]] = {"parts": _PARTS, "needs": _NEEDS, "lists": _LISTS, "tails": _TAILS}
"""Of the members that a listing does not parse: what reads each."""
_BAD = (msgspec.MsgspecError, ValueError, RecursionError)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_T = TypeVar("_T")


class IndexLine(msgspec.Struct, gc=False):
    """One episode of a checkpoint. What a listing does not need is parsed and checked when it is looked at."""

    rollout_id: str
    attempt: Annotated[int, msgspec.Meta(ge=0, le=MAX_ATTEMPT)]
    turns: _Count
    """Delivered model calls."""
    size_bytes: _Count = msgspec.field(name="bytes")
    """Bytes of JSON that its parts take."""
    raw_parts: msgspec.Raw = msgspec.field(name="parts")
    boundary: Boundary | None = None
    raw_needs: msgspec.Raw = msgspec.field(name="needs", default=msgspec.Raw(b"null"))
    raw_lists: msgspec.Raw = msgspec.field(name="lists", default=msgspec.Raw(b"{}"))
    raw_tails: msgspec.Raw = msgspec.field(name="tails", default=msgspec.Raw(b"{}"))
    digest: str | None = None
    next: _Count | None = None
    where: str = ""
    """The file and frame it stands in: set by who reads it, never stored."""

    @property
    def episode(self) -> EpisodeId:
        # A listing asks this a hundred thousand times: the full check only where an ending could read as an attempt,
        # and a tuple made without the named tuple's constructor, which is Python.
        rollout_id = self.rollout_id
        if not _IS_NAME(rollout_id) or ("-a" in rollout_id and not _is_rollout_id(rollout_id)):
            raise self._damage("its rollout_id")
        return tuple.__new__(EpisodeId, (rollout_id, self.attempt))

    @property
    def needs(self) -> Needs | None:
        return self._parse(_NEEDS, self.raw_needs, "needs")

    @property
    def parts(self) -> tuple[Address, ...]:
        return tuple(Address(*address) for address in self._parse(_PARTS, self.raw_parts, "parts"))

    @property
    def chain(self) -> Chain:
        """What an append to this episode has to know."""
        parts, lists = self.parts, self._parse(_LISTS, self.raw_lists, "lists")
        if any(len(lengths) != len(parts) for lengths in lists.values()):
            raise self._damage("its lists")
        following = len(parts) if self.next is None else self.next
        tails = self._parse(_TAILS, self.raw_tails, "tails")
        return Chain(parts, _shared(lists), following, None, self.digest, _shared(tails))

    def _parse(self, decoder: msgspec.json.Decoder[_T], raw: msgspec.Raw, name: str) -> _T:
        try:
            return decoder.decode(raw)
        except _BAD as error:
            raise self._damage(f"its {name}") from error

    def _damage(self, what: str) -> DamagedState:
        return _damage(self.where, self.rollout_id, what)


class _Table(msgspec.Struct):
    file: str
    frames: list[tuple[_Count, _Count]]


class Header(msgspec.Struct):
    """The first line: every segment, and `[compressed, uncompressed]` bytes of each of its frames."""

    segments: list[_Table]


_HEADER = msgspec.json.Decoder(Header)
_LINES = msgspec.json.Decoder(IndexLine)
_key = attrgetter("rollout_id", "attempt")


def _shared(by_pointer: Mapping[str, _T]) -> Mapping[str, _T]:
    """The same with one copy of each pointer in the process: a hundred thousand episodes have the same few."""
    return {sys.intern(pointer): value for pointer, value in by_pointer.items()} if by_pointer else _NOTHING


def _damage(where: str, rollout_id: str, what: str) -> DamagedState:
    return DamagedState(f"{where}: the line of {rollout_id[:160]!r} is not as we write it: {what}")


def _is_rollout_id(value: str) -> bool:
    try:
        return check_rollout_id(value) == value
    except InvalidRolloutId:
        return False


def header_line(segments: Sequence[Segment]) -> bytes:
    """The first line."""
    frames = [{"file": s.file, "frames": [[f.size_bytes, f.raw_bytes] for f in s.frames]} for s in segments]
    return jsoncodec.dumps({"segments": frames}) + b"\n"


class _NewLine(msgspec.Struct, omit_defaults=True, gc=False):
    """A line as it is written: the members in their order, and no more than there is to say."""

    rollout_id: str
    attempt: int
    boundary: Boundary | None
    turns: int
    bytes: int
    needs: Needs | None
    parts: tuple[Address, ...]
    lists: Mapping[str, tuple[int, ...]] | msgspec.UnsetType = msgspec.UNSET
    tails: Mapping[str, str] | msgspec.UnsetType = msgspec.UNSET
    next: int | msgspec.UnsetType = msgspec.UNSET
    digest: str | None = None


_ENCODER = msgspec.json.Encoder()


def index_line(episode: EpisodeId, boundary: Boundary | None, turns: int, needs: Needs | None, chain: Chain) -> bytes:
    """The line of one episode."""
    parts = chain.parts
    size_bytes = parts[0].length if len(parts) == 1 else sum([part.length for part in parts])
    line = _NewLine(episode.rollout_id, episode.attempt, boundary, turns, size_bytes, needs, parts)
    if chain.lists:
        line.lists, line.tails = chain.lists, chain.tails
    if chain.next_part != len(parts):
        line.next = chain.next_part
    line.digest = chain.digest
    return _ENCODER.encode(line) + b"\n"


def read_header(line: bytes, manifest: Manifest, where: str) -> tuple[Segment, ...]:
    """The segments and their frames, in agreement with the manifest; raises `DamagedState`."""
    try:
        tables = _HEADER.decode(line).segments
    except _BAD as error:
        raise DamagedState(f"{where}: its first line is not as we write it: {error}") from error
    if [table.file for table in tables] != [fact.file for fact in manifest.segments]:
        raise DamagedState(f"{where}: its segments are not those of the manifest")
    segments = []
    for fact, table in zip(manifest.segments, tables, strict=True):
        sizes = table.frames
        check_extent(fact, [size for size, _ in sizes], where)
        if sum(raw for _, raw in sizes) != fact.raw_bytes:
            raise DamagedState(f"{where}: the frames of {fact.file} do not hold {fact.raw_bytes} bytes")
        segments.append(Segment(fact, spans(sizes)))
    return tuple(segments)


def read_lines(lines: bytes, where: str, seen: set[tuple[str, int]]) -> list[IndexLine]:
    """The episodes in whole lines, noted in `seen`; raises `DamagedState`, also for one that is there already."""
    try:
        found = _LINES.decode_lines(lines)
    except _BAD as error:
        raise _first_damage(lines, where) from error
    keys = set(map(_key, found))
    if len(keys) < len(found) or not keys.isdisjoint(seen):
        twice = next(key for key, times in Counter([*map(_key, found), *seen]).items() if times > 1)
        raise DamagedState(f"{where}: {EpisodeId(*twice)} is listed twice")
    seen |= keys
    for line in found:
        line.where = where
    return found


def _first_damage(lines: bytes, where: str) -> DamagedState:
    for line in lines.split(b"\n"):
        try:
            _LINES.decode(line)
        except _BAD as error:
            try:
                return _damage(where, str(jsoncodec.loads(line)["rollout_id"]), str(error))
            except (ValueError, TypeError, LookupError):
                break
    return DamagedState(f"{where}: a line that names no episode")


def find_line(lines: bytes, episode: EpisodeId, where: str) -> IndexLine | None:
    """The line of `episode` among whole lines, without parsing the others."""
    start = f'{{"rollout_id":"{episode.rollout_id}","attempt":{episode.attempt},'.encode()
    at = 0 if lines.startswith(start) else lines.find(b"\n" + start) + 1
    if at == 0 and not lines.startswith(start):
        return None
    return read_lines(lines[at : lines.index(b"\n", at) + 1], where, set())[0]
