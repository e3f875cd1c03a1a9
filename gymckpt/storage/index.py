"""The index: what a participant's part of a checkpoint holds, one line per episode, without any payload.

The first line is `{"segments": [{"file", "frames": [[compressed, uncompressed], ...]}, ...]}`. The others are
`{"rollout_id", "attempt", "boundary", "turns", "bytes", "needs", "parts": [[segment, frame, offset, length], ...]}`,
and what an append has to know: `"lists"` (length of each append-only list after each part), `"tails"` (digest of each
list's last item), `"digest"` (of the head), and `"next"` (number of the next part, where parts were merged).
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from gymckpt import jsoncodec
from gymckpt.errors import DamagedState, InvalidRolloutId
from gymckpt.identity import KINDS, MAX_ATTEMPT, NAME_PATTERN, EpisodeId, check_rollout_id, is_safe_name
from gymckpt.storage.manifest import Manifest, Segment, check_extent, spans
from gymckpt.storage.parts import Address, Chain
from gymckpt.storage.records import Boundary, ExportedRecord, Needs

_IS_NAME = re.compile(NAME_PATTERN.removesuffix("$") + r"\Z").match


class IndexLine:
    """One episode of a checkpoint. Fields are checked when they are looked at: a listing of all stays cheap."""

    __slots__ = ("_fields", "_where")

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where

    @property
    def key(self) -> tuple[object, object]:
        """(rollout_id, attempt), unchecked: for counting and looking up."""
        return self._fields["rollout_id"], self._fields["attempt"]

    @property
    def rollout_id(self) -> str:
        return self.episode.rollout_id

    @property
    def episode(self) -> EpisodeId:
        rollout_id, attempt = self._fields["rollout_id"], self._fields["attempt"]
        if type(rollout_id) is not str or type(attempt) is not int or not 0 <= attempt <= MAX_ATTEMPT:
            raise self._damage("its episode")
        # A listing asks this a hundred thousand times: the full check only where an ending could read as an attempt.
        if not _IS_NAME(rollout_id) or ("-a" in rollout_id and not _is_rollout_id(rollout_id)):
            raise self._damage("its rollout_id")
        return EpisodeId(rollout_id, attempt)

    @property
    def boundary(self) -> Boundary | None:
        fields = self._fields.get("boundary")
        if fields is None:
            return None
        if not isinstance(fields, dict):
            raise self._damage("its boundary")
        step, number, at = fields.get("step"), fields.get("number"), fields.get("at")
        if type(step) is not str or type(number) is not int or number < 0 or not isinstance(at, (float, int)):
            raise self._damage("its boundary")
        return Boundary(step, number, at)

    @property
    def turns(self) -> int:
        """Delivered model calls."""
        return self._count("turns")

    @property
    def size_bytes(self) -> int:
        """Bytes of JSON that its parts take."""
        return self._count("bytes")

    @property
    def needs(self) -> Needs | None:
        fields = self._fields.get("needs")
        if fields is None:
            return None
        if not isinstance(fields, list) or not all(_is_need(need) for need in fields):
            raise self._damage("its needs")
        return tuple((kind, instance) for kind, instance in fields)

    @property
    def parts(self) -> tuple[Address, ...]:
        fields = self._fields.get("parts")
        if not isinstance(fields, list) or not fields or not all(_is_address(address) for address in fields):
            raise self._damage("its parts")
        return tuple(Address(*address) for address in fields)

    @property
    def chain(self) -> Chain:
        """What an append to this episode has to know."""
        parts, lists, digest = self.parts, self._fields.get("lists", {}), self._fields.get("digest")
        if not isinstance(lists, dict) or not isinstance(digest, (str, type(None))):
            raise self._damage("its lists")
        for lengths in lists.values():
            if not isinstance(lengths, list) or len(lengths) != len(parts) or not all(map(_is_count, lengths)):
                raise self._damage("its lists")
        tails, following = self._fields.get("tails", {}), self._fields.get("next", len(parts))
        if not isinstance(tails, dict) or not all(isinstance(tail, str) for tail in tails.values()):
            raise self._damage("its tails")
        if not _is_count(following):
            raise self._damage("its next part")
        return Chain(parts, {name: tuple(lengths) for name, lengths in lists.items()}, following, None, digest, tails)

    def _count(self, name: str) -> int:
        value = self._fields.get(name)
        if not _is_count(value):
            raise self._damage(f"its {name}")
        return value

    def _damage(self, what: str) -> DamagedState:
        rollout_id = str(self._fields.get("rollout_id"))[:160]
        return DamagedState(f"{self._where}: the line of {rollout_id!r} is not as we write it: {what}")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _is_rollout_id(value: str) -> bool:
    try:
        return check_rollout_id(value) == value
    except InvalidRolloutId:
        return False


def _is_need(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return value[0] in KINDS and isinstance(value[1], str) and is_safe_name(value[1])


def _is_address(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_count, value))


def header_line(segments: Sequence[Segment]) -> bytes:
    """The first line."""
    frames = [{"file": s.file, "frames": [[f.size_bytes, f.raw_bytes] for f in s.frames]} for s in segments]
    return jsoncodec.dumps({"segments": frames}) + b"\n"


def index_line(exported: ExportedRecord, chain: Chain) -> bytes:
    """The line of one episode."""
    boundary = exported.boundary
    fields: dict[str, Any] = {
        "rollout_id": exported.episode.rollout_id,
        "attempt": exported.episode.attempt,
        "boundary": {"step": boundary.step, "number": boundary.number, "at": boundary.at} if boundary else None,
        "turns": exported.turns,
        "bytes": sum(part.length for part in chain.parts),
        "needs": exported.needs,
        "parts": [[*part] for part in chain.parts],
    }
    if chain.lists:
        fields["lists"] = chain.lists
        fields["tails"] = chain.tails
    if chain.next_part != len(chain.parts):
        fields["next"] = chain.next_part
    if chain.digest is not None:
        fields["digest"] = chain.digest
    return jsoncodec.dumps(fields) + b"\n"


def read_header(line: bytes, manifest: Manifest, where: str) -> tuple[Segment, ...]:
    """The segments and their frames, in agreement with the manifest; raises `DamagedState`."""
    try:
        tables = jsoncodec.loads_exact(line)["segments"]
        frames = {table["file"]: [(size, raw) for size, raw in table["frames"]] for table in tables}
    except (ValueError, TypeError, LookupError) as error:
        raise DamagedState(f"{where}: its first line is not as we write it") from error
    if [table["file"] for table in tables] != [fact.file for fact in manifest.segments]:
        raise DamagedState(f"{where}: its segments are not those of the manifest")
    segments = []
    for fact in manifest.segments:
        sizes = frames[fact.file]
        if not all(_is_count(size) and _is_count(raw) for size, raw in sizes):
            raise DamagedState(f"{where}: the frames of {fact.file} are not as we write them")
        check_extent(fact, [size for size, _ in sizes], where)
        if sum(raw for _, raw in sizes) != fact.raw_bytes:
            raise DamagedState(f"{where}: the frames of {fact.file} do not hold {fact.raw_bytes} bytes")
        segments.append(Segment(fact, spans(sizes)))
    return tuple(segments)


def read_lines(lines: bytes, where: str, seen: set[tuple[object, object]] | None = None) -> Iterator[IndexLine]:
    """The episodes in whole lines, noted in `seen`; raises `DamagedState`, also for one that is there already."""
    seen = set() if seen is None else seen
    for line in lines.rstrip(b"\n").split(b"\n") if lines else ():
        try:
            fields = jsoncodec.loads_exact(line)
            key = (fields["rollout_id"], fields["attempt"])
            before = len(seen)
            seen.add(key)
        except (ValueError, TypeError, LookupError) as error:
            raise DamagedState(f"{where}: a line that names no episode") from error
        if len(seen) == before:
            raise DamagedState(f"{where}: {str(key)[:160]} is listed twice")
        yield IndexLine(fields, where)


def find_line(lines: bytes, episode: EpisodeId, where: str) -> IndexLine | None:
    """The line of `episode` among whole lines, without parsing the others."""
    start = f'{{"rollout_id":"{episode.rollout_id}","attempt":{episode.attempt},'.encode()
    at = 0 if lines.startswith(start) else lines.find(b"\n" + start) + 1
    if at == 0 and not lines.startswith(start):
        return None
    return next(read_lines(lines[at : lines.index(b"\n", at) + 1], where))
