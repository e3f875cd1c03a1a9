"""The lines of a segment: an episode's state, whole (`full`) or what was added since (`append`).

A line is `{"rollout_id", "attempt", "part", "op": "full", "record"}` or `{..., "op": "append", "head", "lists"}`. The
head is the record with each append-only list replaced by `[]`; `lists` gives, per JSON pointer, what to add from where.
A line that orjson would not read exactly has `"wide": true` before its payload.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import msgspec

from gymckpt import jsoncodec
from gymckpt.errors import CheckpointFailed, DamagedState
from gymckpt.identity import EpisodeId
from gymckpt.storage.records import ExportedRecord, Record

ENVELOPE_BYTES = 4096
"""More than a line has beside its record or its head and lists, pointers of ordinary length included."""


Line: TypeAlias = tuple[bytes, ...]
"""A line in pieces, newline included: making one of them would copy the record once more."""


class Address(NamedTuple):
    """Where a part's line stands: number of the segment and of the frame, then bytes within the uncompressed frame."""

    segment: int
    frame: int
    offset: int
    length: int


class Chain(msgspec.Struct, frozen=True, gc=False):
    """What a participant knows of an episode that is stored already: its parts, and what they amount to."""

    parts: tuple[Address, ...]
    lists: Mapping[str, tuple[int, ...]]
    """Length of each append-only list after each part."""
    next_part: int
    """Numbers only rise along a chain, merges included."""
    revision: int | None = None
    digest: str | None = None
    """Of the head's bytes after the last part, where the role counts no revisions."""
    tails: Mapping[str, str] = {}
    """Digest of each list's last item: a list that was replaced by another is not taken for one that grew."""

    def until(self, count: int) -> "Chain | None":
        """Only the first `count` parts, or None if nothing can be appended to them."""
        if count <= 0:
            return None
        lists = {pointer: lengths[:count] for pointer, lengths in self.lists.items()}
        return Chain(self.parts[:count], lists, self.next_part)

    def lengths(self) -> dict[str, int]:
        """Of each append-only list, after the last part."""
        return {pointer: lengths[-1] for pointer, lengths in self.lists.items()}

    def after(self, address: Address, encoded: "Encoded", revision: int | None) -> "Chain":
        """This chain with one more part."""
        lists = {name: (*self.lists.get(name, ()), length) for name, length in encoded.lists.items()}
        return Chain((*self.parts, address), lists, self.next_part + 1, revision, encoded.digest, encoded.tails)

    def same(self, encoded: "Encoded", revision: int | None) -> "Chain":
        """This chain, found to hold an export already."""
        return Chain(self.parts, self.lists, self.next_part, revision, encoded.digest, encoded.tails)


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """An exported record taken apart while nothing can change: the head, and the pinned items of each list."""

    exported: ExportedRecord
    head: Record
    items: Mapping[str, list[Any]]


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """What an export amounts to: a line to write, or None if what is stored already is the same."""

    line: Line | None
    lists: Mapping[str, int]
    digest: str | None
    appended: bool
    tails: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.line or ()))


def take(exported: ExportedRecord) -> Snapshot:
    """Pin `exported`: copies references only, and is done before the event loop goes on."""
    head, items = exported.record, {}
    if exported.lists:
        head = dict(head)
        for pointer, length in exported.lists.items():
            source, parent, key = _detach(head, pointer, exported.episode)
            if not 0 <= length <= len(source):
                raise CheckpointFailed(f"{exported.episode}: the list {pointer} has {len(source)} items, not {length}")
            items[pointer] = source[:length]
            parent[key] = []
    return Snapshot(exported, head, items)


def is_unchanged(exported: ExportedRecord, chain: Chain) -> bool:
    """Whether the role's own count says that `exported` is what `chain` holds."""
    return (
        exported.revision is not None
        and exported.revision == chain.revision
        and dict(exported.lists) == chain.lengths()
    )


def encode_some(job: list[tuple[Snapshot, Chain | None]], max_record_bytes: int, enough_bytes: int) -> list[Encoded]:
    """As many of the job, from its first, as come to `enough_bytes`; raises as `encode` does."""
    done: list[Encoded] = []
    size_bytes = 0
    for snapshot, chain in job:
        if size_bytes >= enough_bytes:
            break
        if chain is not None and is_unchanged(snapshot.exported, chain):
            done.append(Encoded(None, snapshot.exported.lists, chain.digest, appended=True, tails=chain.tails))
        else:
            done.append(encode(snapshot, chain, max_record_bytes))
        size_bytes += done[-1].size_bytes
    return done


def encode(snapshot: Snapshot, chain: Chain | None, max_record_bytes: int) -> Encoded:
    """The line to add to `chain`, or none if its bytes are as stored.

    Raises `CheckpointFailed`, naming the episode, if it is too large or not JSON.
    """
    try:
        return _encode(snapshot, chain, max_record_bytes)
    except jsoncodec.NotJson as error:
        raise CheckpointFailed(f"{snapshot.exported.episode}: its record is not JSON: {error.detail}") from error


def _encode(snapshot: Snapshot, chain: Chain | None, max_record_bytes: int) -> Encoded:
    exported, lengths = snapshot.exported, chain.lengths() if chain else {}
    grows = chain is not None and _grew(chain, lengths, snapshot)
    tails = {name: _tail(items, len(items)) for name, items in snapshot.items.items()}
    appended = grows and bool(snapshot.items)
    compare = exported.revision is None
    head, exact = jsoncodec.encode(snapshot.head) if appended or compare else (b"", True)
    digest = head_digest(head) if compare else None
    if (
        grows
        and chain is not None
        and digest is not None
        and digest == chain.digest
        and lengths == dict(exported.lists)
    ):
        return Encoded(None, exported.lists, digest, appended=True, tails=tails)
    if appended:
        added = {
            name: {"from": lengths[name], "items": items[lengths[name] :]} for name, items in snapshot.items.items()
        }
        lists, lists_exact = jsoncodec.encode(added)
        exact = exact and lists_exact
        payload: Line = (b',"head":', head, b',"lists":', lists, b"}\n")
    else:
        if snapshot.items or not head:
            head, exact = jsoncodec.encode(_whole(snapshot))
        payload = (b',"record":', head, b"}\n")
    check_size(sum(map(len, payload)), max_record_bytes, exported.episode)
    part = chain.next_part if appended and chain else 0
    line = (envelope(exported.episode, part, "append" if appended else "full", exact), *payload)
    return Encoded(line, exported.lists, digest, appended, tails)


def _grew(chain: Chain, before: Mapping[str, int], snapshot: Snapshot) -> bool:
    """Whether every list begins with what `chain` holds of it, as far as its length and last item tell."""
    if before.keys() != snapshot.items.keys():
        return False
    for name, length in before.items():
        items, tail = snapshot.items[name], chain.tails.get(name)
        if len(items) < length or (tail is not None and tail != _tail(items, length)):
            return False
    return True


def _tail(items: list[Any], length: int) -> str:
    return hashlib.sha256(jsoncodec.likeness(items[length - 1])).hexdigest()[:16] if length else ""


def check_size(size_bytes: int, max_record_bytes: int, episode: EpisodeId) -> None:
    """`CheckpointFailed` if a payload is larger than the settings allow."""
    if size_bytes > max_record_bytes:
        raise CheckpointFailed(
            f"{episode}: its record has {size_bytes} bytes of JSON, more than the {max_record_bytes} allowed",
            hint="raise max_record_bytes",
        )


def head_digest(head: bytes) -> str:
    """Half a SHA-256 of the head's JSON: whether anything but append-only lists changed."""
    return hashlib.sha256(head).hexdigest()[:32]


def envelope(episode: EpisodeId, part: int, op: str, exact: bool) -> bytes:
    """How a line begins."""
    wide = "" if exact else ',"wide":true'
    return f'{{"rollout_id":"{episode.rollout_id}","attempt":{episode.attempt},"part":{part},"op":"{op}"{wide}'.encode()


def _whole(snapshot: Snapshot) -> Record:
    """The record with its lists as pinned. The containers on the way to each were copied by `take`."""
    for pointer, items in snapshot.items.items():
        _place(snapshot.head, pointer, items)
    return snapshot.head


def read_line(line: bytes | memoryview, where: str) -> dict[str, Any]:
    """A part's line as an object with checked envelope; raises `DamagedState`."""
    try:
        wide = b',"wide":true,' in bytes(line[:512])
        part = jsoncodec.loads_slowly(bytes(line)) if wide else jsoncodec.loads_exact(line)
    except ValueError as error:
        raise DamagedState(f"{where}: {error}") from error
    if not isinstance(part, dict) or not isinstance(part.get("part"), int) or not isinstance(part.get("attempt"), int):
        raise DamagedState(f"{where}: not a part of an episode")
    return part


def assemble(lines: Iterable[bytes | memoryview], episode: EpisodeId, where: str) -> Record:
    """The record that the parts of `episode` amount to, each checked to be the next of it; raises `DamagedState`."""
    record: Record | None = None
    held: dict[str, list[Any]] = {}
    number = attempt = -1
    for line in lines:
        part = read_line(line, where)
        if part.get("rollout_id") != episode.rollout_id or not attempt <= part["attempt"] <= episode.attempt:
            raise DamagedState(
                f"{where}: a part of {part.get('rollout_id')!r} attempt {part['attempt']} where {episode} is"
            )
        if part["part"] <= number:
            raise DamagedState(f"{where}: part {part['part']} of {episode} after part {number}")
        number, attempt = part["part"], part["attempt"]
        if part.get("op") == "full":
            record, held = part.get("record"), {}
        elif part.get("op") == "append" and record is not None:
            record, held = _extend(record, held, part, where)
        else:
            raise DamagedState(f"{where}: part {number} of {episode} cannot stand here")
        if not isinstance(record, dict):
            raise DamagedState(f"{where}: the record of {episode} is not an object")
    if record is None:
        raise DamagedState(f"{where}: {episode} has no parts")
    for pointer, items in held.items():
        _find(record, pointer, where)
        _place(record, pointer, items)
    return record


def _extend(
    record: Record, held: dict[str, list[Any]], part: dict[str, Any], where: str
) -> tuple[Record, dict[str, list[Any]]]:
    """Apply an append: the lists it names grow, and wait to be put into the last head."""
    head, lists = part.get("head"), part.get("lists")
    if not isinstance(head, dict) or not isinstance(lists, dict):
        raise DamagedState(f"{where}: an append without head or lists")
    for pointer, addition in lists.items():
        items = held.get(pointer)
        if items is None:
            items = held[pointer] = list(_find(record, pointer, where))
        if not isinstance(addition, dict) or not isinstance(addition.get("items"), list):
            raise DamagedState(f"{where}: an append to {pointer} without items")
        if addition.get("from") != len(items):
            raise DamagedState(
                f"{where}: an append to {pointer} from {addition.get('from')}, which has {len(items)} items"
            )
        items.extend(addition["items"])
    return head, held


@lru_cache(maxsize=256)
def _steps(pointer: str) -> tuple[str, ...]:
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:])


def _step(container: Any, step: str) -> tuple[Any, str | int]:
    """The member of `container` at `step`, and its key; raises `LookupError` or `TypeError`."""
    if isinstance(container, list):
        return container[int(step)], int(step)
    if not isinstance(container, dict):
        raise TypeError(f"{type(container).__name__} has no members")
    return container[step], step


def _walk(record: Record, pointer: str) -> Iterator[tuple[Any, str | int, Any]]:
    """(container, key, member) along `pointer`."""
    container: Any = record
    for step in _steps(pointer):
        member, key = _step(container, step)
        yield container, key, member
        container = member


def _detach(head: Record, pointer: str, episode: EpisodeId) -> tuple[list[Any], Any, str | int]:
    """Copy the containers on the way to the list at `pointer`; the list itself, the copy that holds it, and its key."""
    try:
        parent: Any = head
        steps = _steps(pointer)
        for step in steps[:-1]:
            member, key = _step(parent, step)
            parent[key] = member = dict(member) if isinstance(member, dict) else list(member)
            parent = member
        found, key = _step(parent, steps[-1])
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointFailed(f"{episode}: its record has no append-only list at {pointer!r}") from error
    if not isinstance(found, list):
        raise CheckpointFailed(f"{episode}: what its record has at {pointer!r} is not a list")
    return found, parent, key


def _find(record: Record, pointer: str, where: str) -> list[Any]:
    try:
        *_, (_, _, found) = _walk(record, pointer)
    except (LookupError, TypeError, ValueError) as error:
        raise DamagedState(f"{where}: no list at {pointer!r}") from error
    if not isinstance(found, list):
        raise DamagedState(f"{where}: what stands at {pointer!r} is not a list")
    return found


def _place(record: Record, pointer: str, items: list[Any]) -> None:
    *_, (container, key, _) = _walk(record, pointer)
    container[key] = items
