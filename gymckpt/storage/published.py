"""What makes a checkpoint one: `collection.json`, the controller's record, and `CHECKPOINT.json`, written last.

`CHECKPOINT.json` names every participant's manifest and `collection.json` by SHA-256. Its existence, valid, is the
commit. Both carry the digest of their own bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymckpt.errors import DamagedState
from gymckpt.identity import KINDS, MAX_ATTEMPT, NAME_PATTERN, EpisodeId, Kind, check_rollout_id, is_safe_name
from gymckpt.storage.journalfiles import Position
from gymckpt.storage.manifest import MANIFEST, Sha256, Size
from gymckpt.storage.sealing import seal, unseal

CHECKPOINT = "CHECKPOINT.json"
COLLECTION = "collection.json"
PARTICIPANTS = "gym"
LATEST = "LATEST"
SCHEMA_VERSION = 1

_Name = Annotated[str, Field(pattern=NAME_PATTERN)]
_Attempt = Annotated[int, Field(ge=0, le=MAX_ATTEMPT)]


@dataclass(frozen=True, slots=True)
class Restarted:
    """An episode that a checkpoint will not continue, and why."""

    episode: EpisodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Collection:
    """The controller's record of a checkpoint."""

    checkpoint_id: str
    run_id: str
    sequence: int
    epoch: int
    created_at: float
    """Unix seconds."""
    continued: list[EpisodeId] = field(default_factory=list)
    restarted: list[Restarted] = field(default_factory=list)
    journals: Mapping[str, Position] = field(default_factory=dict)
    """How far each journal had come."""
    name: str | None = None
    """A named checkpoint is never pruned."""


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """A checkpoint that counts."""

    path: PurePath
    collection: Collection
    participants: tuple[tuple[Kind, str], ...]
    size_bytes: int
    """Of all its files, shared ones included."""

    @property
    def checkpoint_id(self) -> str:
        return self.collection.checkpoint_id

    @property
    def age(self) -> tuple[int, int]:
        """Higher is newer."""
        return self.collection.epoch, self.collection.sequence

    def directory(self, kind: Kind, instance: str) -> PurePath:
        """Where a participant's part is."""
        return self.path / PARTICIPANTS / kind / instance


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Episode(_Strict):
    rollout_id: _Name
    attempt: _Attempt


class _Restarted(_Episode):
    reason: Annotated[str, Field(max_length=1000)]


class CollectionFile(_Strict):
    """`collection.json`."""

    schema_version: Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    checkpoint_id: _Name
    run_id: _Name
    sequence: Size
    epoch: Size
    created_at: float
    name: _Name | None
    continued: list[_Episode]
    restarted: list[_Restarted]
    journals: dict[str, dict[str, Any]]


class NamedFile(_Strict):
    """A file of the checkpoint, by its path below the checkpoint's directory."""

    path: Annotated[str, Field(max_length=400)]
    bytes: Size
    sha256: Sha256


class CheckpointFile(_Strict):
    """`CHECKPOINT.json`."""

    schema_version: Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    checkpoint_id: _Name
    run_id: _Name
    sequence: Size
    epoch: Size
    created_at: float
    name: _Name | None
    size_bytes: Size
    files: list[NamedFile]

    def to_bytes(self) -> bytes:
        return seal(self.model_dump(mode="json"))

    def participants(self) -> tuple[tuple[Kind, str], ...]:
        """(kind, instance) of each manifest; raises `DamagedState` for a path that is none."""
        return tuple(participant_of(file.path) for file in self.files if file.path != COLLECTION)


def participant_of(path: str) -> tuple[Kind, str]:
    """(kind, instance) that a manifest's path names; raises `DamagedState` for any other path."""
    steps = path.split("/")
    if len(steps) == 4 and steps[0] == PARTICIPANTS and steps[3] == MANIFEST and is_safe_name(steps[2]):
        for kind in KINDS:
            if steps[1] == kind:
                return kind, steps[2]
    raise DamagedState(f"{path[:160]!r} is not the manifest of a participant")


def read_checkpoint_file(data: bytes, where: str) -> CheckpointFile:
    """Check and read `CHECKPOINT.json`; raises `DamagedState`."""
    content = unseal(data, where)
    try:
        found = CheckpointFile.model_validate(content)
    except ValidationError as error:
        raise DamagedState(f"{where}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
    paths = [file.path for file in found.files]
    if len(set(paths)) != len(paths) or COLLECTION not in paths:
        raise DamagedState(f"{where}: it does not name {COLLECTION} and each manifest once")
    found.participants()
    return found


def collection_bytes(collection: Collection) -> bytes:
    """The bytes of `collection.json`."""
    return seal(
        {
            "schema_version": SCHEMA_VERSION,
            "checkpoint_id": collection.checkpoint_id,
            "run_id": collection.run_id,
            "sequence": collection.sequence,
            "epoch": collection.epoch,
            "created_at": float(collection.created_at),
            "name": collection.name,
            "continued": [{"rollout_id": e.rollout_id, "attempt": e.attempt} for e in collection.continued],
            "restarted": [
                {"rollout_id": r.episode.rollout_id, "attempt": r.episode.attempt, "reason": r.reason}
                for r in collection.restarted
            ],
            "journals": {name: position.to_json() for name, position in collection.journals.items()},
        }
    )


def read_collection(data: bytes, where: str) -> Collection:
    """Check and read `collection.json`; raises `DamagedState`."""
    content = unseal(data, where)
    try:
        found = CollectionFile.model_validate(content)
        continued = [EpisodeId(check_rollout_id(e.rollout_id), e.attempt) for e in found.continued]
        restarted = [Restarted(EpisodeId(check_rollout_id(r.rollout_id), r.attempt), r.reason) for r in found.restarted]
    except ValidationError as error:
        raise DamagedState(f"{where}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
    if len({e.rollout_id for e in continued}) != len(continued):
        raise DamagedState(f"{where}: it continues a rollout twice")
    return Collection(
        checkpoint_id=found.checkpoint_id,
        run_id=found.run_id,
        sequence=found.sequence,
        epoch=found.epoch,
        created_at=found.created_at,
        continued=continued,
        restarted=restarted,
        journals={name: Position.from_json(value, where) for name, value in found.journals.items()},
        name=found.name,
    )
