"""The form in which NeMo Gym's own participants store their records.

`records-<sha256>.jsonl`, and `manifest.json` {schema_version: 1, kind, instance, checkpoint_id, records_file,
records_sha256, record_count}. Read for inspect, verify and restore.
"""

import hashlib
from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import DamagedState, InvalidRolloutId
from gymckpt.identity import MAX_ATTEMPT, NAME_PATTERN, EpisodeId, Kind, check_rollout_id
from gymckpt.ports import FileSystem
from gymckpt.storage import durable
from gymckpt.storage.index import IndexLine
from gymckpt.storage.manifest import MANIFEST, Sha256, Size
from gymckpt.storage.records import Boundary, Record, StoredRecord

_CHUNK_BYTES = 4 << 20


class PlainManifest(BaseModel):
    """Gym's `manifest.json`."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    schema_version: int = Field(1, ge=1, le=1)
    kind: Kind
    instance: Annotated[str, Field(pattern=NAME_PATTERN)]
    checkpoint_id: Annotated[str, Field(pattern=NAME_PATTERN)]
    records_file: Annotated[str, Field(pattern=r"^records-[0-9a-f]{64}\.jsonl$")]
    records_sha256: Sha256
    record_count: Size


def is_plain(manifest: bytes) -> bool:
    """Whether a manifest's bytes are of Gym's form."""
    return b'"records_file"' in manifest


class PlainForm:
    """One participant's records in Gym's form. Blocking. Raises `DamagedState`."""

    def __init__(self, fs: FileSystem, directory: PurePath, manifest: bytes, max_record_bytes: int) -> None:
        where = directory / MANIFEST
        try:
            self._manifest = PlainManifest.model_validate_json(manifest)
        except ValidationError as error:
            raise DamagedState(f"{where}: {error.errors()[0]['msg']} at {error.errors()[0]['loc']}") from error
        self._fs = fs
        self._path = directory / self._manifest.records_file
        self._max_record_bytes = max_record_bytes
        if self._manifest.records_file != f"records-{self._manifest.records_sha256}.jsonl":
            raise DamagedState(f"{where}: records_file and records_sha256 do not agree")
        with durable.reading(self._path):
            entry = fs.stat(self._path)
        if entry.kind != "file":
            raise DamagedState(f"{self._path}: not a regular file")
        self.stored_bytes = entry.size_bytes

    @property
    def kind(self) -> Kind:
        return self._manifest.kind

    @property
    def instance(self) -> str:
        return self._manifest.instance

    @property
    def checkpoint_id(self) -> str:
        return self._manifest.checkpoint_id

    @property
    def record_count(self) -> int:
        return self._manifest.record_count

    def check(self) -> None:
        """The digest of all records."""
        digest = hashlib.sha256()
        for chunk in self._chunks():
            digest.update(chunk)
        if digest.hexdigest() != self._manifest.records_sha256:
            raise DamagedState(f"{self._path}: its bytes are not those that the manifest names")

    def index(self) -> Iterator[IndexLine]:
        """Every record's episode and place. Each record is parsed on the way."""
        seen: set[EpisodeId] = set()
        for number, (offset, line) in enumerate(self._lines()):
            where = f"{self._path} line {number + 1}"
            record = _parse(line, where)
            episode = _episode(record, where)
            if episode in seen:
                raise DamagedState(f"{where}: {episode} stands there twice")
            seen.add(episode)
            yield _index_line(episode, record, offset, len(line), where)
        if len(seen) != self.record_count:
            raise DamagedState(f"{self._path}: {len(seen)} records, the manifest says {self.record_count}")

    def read(self, line: IndexLine) -> StoredRecord:
        """The record that one line of `index` stands for."""
        _, _, offset, length = line.parts[0]
        with durable.reading(self._path):
            record = _parse(self._fs.read(self._path, offset, length), f"{self._path} at {offset}")
        return StoredRecord(line.episode, record, line.boundary, line.turns, line.needs)

    def _chunks(self) -> Iterator[bytes]:
        offset = 0
        while True:
            with durable.reading(self._path):
                chunk = self._fs.read(self._path, offset, _CHUNK_BYTES)
            if not chunk:
                return
            offset += len(chunk)
            yield chunk

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        rest, offset = b"", 0
        for chunk in self._chunks():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield offset, line
                offset += len(line) + 1
            if len(rest) > self._max_record_bytes:
                raise DamagedState(f"{self._path}: a line of more than {self._max_record_bytes} bytes at {offset}")
        if rest:
            yield offset, rest


def _parse(line: bytes, where: str) -> Record:
    try:
        record = jsoncodec.loads(line)
    except ValueError as error:
        raise DamagedState(f"{where}: {error}") from error
    if not isinstance(record, dict):
        raise DamagedState(f"{where}: not an object")
    return record


def _episode(record: Record, where: str) -> EpisodeId:
    reference = record.get("episode_id")
    if isinstance(reference, dict):
        rollout_id, attempt = reference.get("rollout_id"), reference.get("attempt", 0)
        if isinstance(rollout_id, str) and type(attempt) is int and 0 <= attempt <= MAX_ATTEMPT:
            try:
                return EpisodeId(check_rollout_id(rollout_id), attempt)
            except InvalidRolloutId as error:
                raise DamagedState(f"{where}: {error}") from error
    raise DamagedState(f"{where}: a record without an episode_id")


def _index_line(episode: EpisodeId, record: Record, offset: int, length: int, where: str) -> IndexLine:
    """What our index would say of it: Gym's boundaries name a step, the rest is unknown."""
    boundary = record.get("boundary")
    step = boundary.get("step") if isinstance(boundary, dict) else None
    known = Boundary(step, 0, 0.0) if isinstance(step, str) else None
    place = msgspec.Raw(jsoncodec.dumps([[0, 0, offset, length]]))
    return IndexLine(*episode, turns=0, size_bytes=length, raw_parts=place, boundary=known, where=where)
