"""What a participant's part of a checkpoint consists of: `manifest.json`, written last, and the segment tables.

The manifest names every file with its bytes and SHA-256. The first line of the index holds the frames of each segment.
"""

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import DamagedState
from gymckpt.identity import NAME_PATTERN, Kind
from gymckpt.storage.frames import FrameSpan
from gymckpt.storage.sealing import seal, unseal

MANIFEST = "manifest.json"
FORMAT = "gymckpt"
SCHEMA_VERSION = 1
MAX_SEGMENTS = 16
MAX_FILES = 20
MAX_INDEX_FRAME_BYTES = 64 << 20
"""Lines of one frame of the index: a frame takes about 1 MiB, plus one line of any length up to this."""

_FILE = re.compile(r"(segment|episodes|prefixes)-[0-9a-f]{64}\.jsonl\.zst\Z")

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, le=1 << 50)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileFact(_Strict):
    """One file beside the manifest."""

    file: str = Field(max_length=128)
    bytes: Size
    sha256: Sha256


class SegmentFact(FileFact):
    raw_bytes: Size
    """Bytes of lines in it, live or not."""


class IndexFact(FileFact):
    frames: list[tuple[Size, Size]] = Field(max_length=1 << 20)
    """Compressed and uncompressed bytes of each frame."""


class Manifest(_Strict):
    """`manifest.json` of our own participants."""

    schema_version: int
    format: str
    kind: Kind
    instance: Annotated[str, Field(pattern=NAME_PATTERN)]
    checkpoint_id: Annotated[str, Field(pattern=NAME_PATTERN)]
    record_count: Size
    raw_bytes: Size
    """Bytes of all live lines."""
    index: IndexFact
    segments: list[SegmentFact] = Field(max_length=MAX_SEGMENTS)
    others: list[FileFact] = Field(default_factory=list, max_length=2)

    @property
    def files(self) -> list[FileFact]:
        return [self.index, *self.segments, *self.others]

    def to_bytes(self) -> bytes:
        """The file's bytes."""
        return seal(self.model_dump(mode="json"))


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment file and where its frames are."""

    fact: SegmentFact
    frames: tuple[FrameSpan, ...]

    @property
    def file(self) -> str:
        return self.fact.file


def read_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in `data`, whole and in a version that we know; raises `DamagedState`."""
    content = unseal(data, where)
    if content.get("format") != FORMAT or content.get("schema_version") != SCHEMA_VERSION:
        raise DamagedState(
            f"{where}: format {content.get('format')!r} version {content.get('schema_version')!r} is not ours"
        )
    try:
        # As JSON: strict mode takes a tuple from an array there, not from a list.
        manifest = Manifest.model_validate_json(jsoncodec.dumps(content))
    except ValidationError as error:
        raise DamagedState(f"{where}: {_first(error)}") from error
    names = [fact.file for fact in manifest.files]
    if len(set(names)) != len(names) or not all(_FILE.match(name) for name in names):
        raise DamagedState(f"{where}: it names files that no participant writes")
    if any(raw > MAX_INDEX_FRAME_BYTES for _, raw in manifest.index.frames):
        raise DamagedState(f"{where}: a frame of the index is larger than {MAX_INDEX_FRAME_BYTES} bytes")
    check_extent(manifest.index, [size for size, _ in manifest.index.frames], where)
    return manifest


def spans(frames: list[tuple[int, int]]) -> tuple[FrameSpan, ...]:
    """Where frames of these (compressed, uncompressed) sizes stand, one after the other."""
    found, offset = [], 0
    for size, raw in frames:
        found.append(FrameSpan(offset, size, raw))
        offset += size
    return tuple(found)


def check_extent(fact: FileFact, sizes: list[int], where: str) -> None:
    """`DamagedState` unless frames of these sizes fill the file exactly."""
    if sum(sizes) != fact.bytes or not all(sizes):
        raise DamagedState(f"{where}: the frames of {fact.file} do not fill its {fact.bytes} bytes")


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'/'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
