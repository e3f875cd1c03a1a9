"""The directory of a run's checkpoints: begin, publish, find the newest that counts, keep few."""

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from collections.abc import Collection as AnyOf
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Literal

from gymckpt.crashpoints import crash_point, declare
from gymckpt.errors import CheckpointFailed, DamagedState, NotAsAsked, StorageUnavailable, UsageError
from gymckpt.identity import KINDS, Kind, checkpoint_sequence, is_safe_name
from gymckpt.ports import FileSystem, Offload
from gymckpt.storage import durable
from gymckpt.storage.manifest import MANIFEST
from gymckpt.storage.participantfiles import ParticipantFiles
from gymckpt.storage.problems import Problem
from gymckpt.storage.published import (
    CHECKPOINT,
    COLLECTION,
    LATEST,
    PARTICIPANTS,
    SCHEMA_VERSION,
    CheckpointFile,
    Collection,
    NamedFile,
    PublishedCheckpoint,
    Restarted,
    collection_bytes,
    read_checkpoint_file,
    read_collection,
)
from gymckpt.storage.scope import Holdings

__all__ = ["CheckpointDirectory", "Collection", "Listed", "PublishedCheckpoint", "Restarted"]

COLLECTION_BEFORE_LINK = declare("publish.collection.before_link", "collection.json is about to get its name")
CHECKPOINT_BEFORE_LINK = declare("publish.checkpoint.before_link", "CHECKPOINT.json is about to get its name")
CHECKPOINT_AFTER_LINK = declare("publish.checkpoint.after_link", "published, but LATEST names the one before")
LATEST_BEFORE_REPLACE = declare("publish.latest.before_replace", "LATEST is about to be replaced")


@dataclass(frozen=True, slots=True)
class Listed:
    """One directory under `checkpoints/`: published, not published, or published once and damaged since; or its state
    cannot be read now."""

    checkpoint_id: str
    state: Literal["published", "unpublished", "damaged", "unreadable"]
    published: PublishedCheckpoint | None = None
    problem: Problem | None = None


async def _unsaid(checkpoint_ids: list[str]) -> None:
    """Nobody keeps a record of what is removed."""


class CheckpointDirectory:
    """`<run>/checkpoints`. Read errors that may pass are `StorageUnavailable`, never taken for damage."""

    def __init__(self, fs: FileSystem, offload: Offload, root: PurePath) -> None:
        self._fs = fs
        self._offload = offload
        self._root = root

    def path(self, checkpoint_id: str) -> PurePath:
        """Where a checkpoint is or would be."""
        if not is_safe_name(checkpoint_id):
            raise NotAsAsked(f"{checkpoint_id[:160]!r} is not a checkpoint id")
        return self._root / checkpoint_id

    async def begin(self, checkpoint_id: str) -> PurePath:
        """Make the directory, durably; `NotAsAsked` if it exists: ids are never used again."""
        return await self._offload.run(lambda: self._begin(checkpoint_id))

    async def publish(
        self, checkpoint_id: str, collection: Collection, *, expected: AnyOf[tuple[Kind, str]] | None = None
    ) -> PublishedCheckpoint:
        """Make it count, durably: check every manifest, write `collection.json`, `CHECKPOINT.json`, then `LATEST`.

        `expected` names the participants whose commits succeeded: `CheckpointFailed` if others are there, or fewer.
        Raises `DamagedState` for a manifest that is not whole, and what writing raises. Safe to repeat.
        """
        return await self._offload.run(lambda: self._publish(checkpoint_id, collection, expected))

    async def newest_valid(
        self, run_id: str | None = None, *, quick: bool = False
    ) -> tuple[PublishedCheckpoint | None, list[Problem]]:
        """The newest checkpoint of the run that is whole, and what is wrong with newer ones that are not.

        The digest of every file is checked (`quick`: only that all are there, in their sizes). Raises
        `StorageUnavailable` where one that may be newer cannot be read now.
        """
        listed = await self.listing()
        problems = [entry.problem for entry in listed if entry.state == "damaged" and entry.problem is not None]
        newest: PublishedCheckpoint | None = None
        for checkpoint in reversed(_of_run(listed, run_id)):
            damage = await self._offload.run(partial(self._damage, checkpoint, quick=quick))
            if damage is None:
                newest = checkpoint
                break
            problems.append(damage)
        for problem in unreadable(listed, newest):
            raise StorageUnavailable(problem.what, hint="make it readable, or name another one (--checkpoint ID)")
        return newest, problems

    async def open(self, checkpoint_id: str) -> PublishedCheckpoint:
        """A published checkpoint by its id; raises `DamagedState`, also if it was never published."""
        return await self._offload.run(lambda: read_published(self._fs, self.path(checkpoint_id)))

    async def verify(self, checkpoint: PublishedCheckpoint, *, quick: bool = False) -> list[Problem]:
        """All that is wrong with a checkpoint, participant by participant."""
        return await verify_checkpoint(self._fs, self._offload, checkpoint, quick=quick)

    async def listing(self) -> list[Listed]:
        """Every checkpoint, oldest first; those that do not count come first."""
        return await self._offload.run(self._listing)

    async def latest(self) -> str | None:
        """What `LATEST` says: a hint."""
        return await self._offload.run(self._latest)

    async def prune(
        self,
        keep: int,
        run_id: str | None = None,
        *,
        intend: Callable[[list[str]], Awaitable[None]] = _unsaid,
    ) -> list[str]:
        """Remove what is older than the newest `keep` (at least 1) that are whole, named checkpoints excepted, and
        whatever was begun before the newest and never published. What was removed.

        Those that are kept are made durable first: one whose publishing failed at its last step may be among them.
        `intend` is told of published ones before they go.
        """
        listed = await self.listing()
        published = _of_run(listed, run_id)
        whole: list[PurePath] = []
        old: list[str] = []
        for checkpoint in reversed(published):
            if len(whole) >= max(1, keep):
                old += [checkpoint.checkpoint_id] if checkpoint.collection.name is None else []
            elif await self._offload.run(partial(self._damage, checkpoint, quick=False)) is None:
                whole.append(checkpoint.path)
        newest = published[-1].collection.sequence if published else 0
        rubbish = [e.checkpoint_id for e in listed if e.state == "unpublished" and _before(e.checkpoint_id, newest)]
        for path in whole if old else ():
            await self._offload.run(partial(durable.sync_directory, self._fs, path))
        if old:
            await intend(old)
        for checkpoint_id in (*old, *rubbish):
            await self.discard(checkpoint_id)
        if published:
            await self._offload.run(self._sweep)
        return [*old, *rubbish]

    async def discard(self, checkpoint_id: str) -> None:
        """Remove one checkpoint: first what makes it count, then the rest. Nothing happens if it is not there."""
        path = self.path(checkpoint_id)

        def remove() -> None:
            if durable.exists(self._fs, path) is not None:
                durable.check_directory(self._fs, path)
                durable.remove_tree(self._fs, path, first=CHECKPOINT)

        await self._offload.run(remove)

    # Blocking

    def _sweep(self) -> None:
        """Remove what a crash left of replacing `LATEST`."""
        with durable.reading(self._root.parent):
            names = [entry.name for entry in self._fs.scan(self._root.parent)]
        for name in names:
            if durable.is_temporary(name) and name.startswith(f".{LATEST}."):
                durable.remove_quietly(self._fs, self._root.parent / name)

    def _damage(self, checkpoint: PublishedCheckpoint, *, quick: bool) -> Problem | None:
        """The first file that is not as it was published."""
        try:
            check_manifests(self._fs, checkpoint.path)
            for kind, instance in checkpoint.participants:
                directory = checkpoint.directory(kind, instance)
                files = ParticipantFiles(self._fs, directory, kind=kind, instance=instance)
                files.open()
                if not quick:
                    files.check_files()
        except DamagedState as error:
            return Problem.of(error)
        return None

    def _begin(self, checkpoint_id: str) -> PurePath:
        path = self.path(checkpoint_id)
        durable.make_directories(self._fs, self._root)
        with durable.writing(path):
            try:
                self._fs.make_directory(path)
            except FileExistsError as error:
                raise NotAsAsked(f"{path} exists: a checkpoint id is never used again") from error
        durable.sync_directory(self._fs, self._root)
        return path

    def _publish(
        self, checkpoint_id: str, collection: Collection, expected: AnyOf[tuple[Kind, str]] | None
    ) -> PublishedCheckpoint:
        path = self.path(checkpoint_id)
        if collection.checkpoint_id != checkpoint_id:
            raise CheckpointFailed(f"the record of {collection.checkpoint_id} was given for {checkpoint_id}")
        present = list(find_participants(self._fs, path))
        if expected is not None and set(expected) != set(present):
            raise CheckpointFailed(f"{checkpoint_id}: manifests of {sorted(present)}, commits of {sorted(expected)}")
        data = collection_bytes(collection)
        files, size = [_named(COLLECTION, data)], len(data)
        for kind, instance in present:
            named, stored = check_part(self._fs, path, kind, instance, checkpoint_id)
            files.append(named)
            size += stored
        checkpoint = CheckpointFile(
            schema_version=SCHEMA_VERSION,
            checkpoint_id=checkpoint_id,
            run_id=collection.run_id,
            sequence=collection.sequence,
            epoch=collection.epoch,
            created_at=float(collection.created_at),
            name=collection.name,
            size_bytes=size,
            files=files,
        )
        self._create(COLLECTION_BEFORE_LINK, path / COLLECTION, data)
        durable.sync_directory(self._fs, path)
        self._create(CHECKPOINT_BEFORE_LINK, path / CHECKPOINT, checkpoint.to_bytes())
        with durable.writing(path):
            crash_point(CHECKPOINT_AFTER_LINK)
        durable.sync_directory(self._fs, path)
        name = checkpoint_id.encode() + b"\n"
        durable.replace_file(self._fs, self._root.parent / LATEST, name, LATEST_BEFORE_REPLACE)
        return PublishedCheckpoint(path, collection, tuple(present), size)

    def _create(self, before: str, path: PurePath, data: bytes) -> None:
        temporary = durable.write_temporary(self._fs, path, data)
        try:
            with durable.writing(path):
                crash_point(before)
            durable.name_finally(self._fs, temporary, path)
        finally:
            durable.remove_quietly(self._fs, temporary)

    def _listing(self) -> list[Listed]:
        if durable.exists(self._fs, self._root) is None:
            return []
        durable.check_directory(self._fs, self._root)
        with durable.reading(self._root):
            entries = [entry for entry in self._fs.scan(self._root) if is_safe_name(entry.name)]
        listed = [self._look(e.name) for e in entries if e.kind == "directory" or _is_checkpoint_id(e.name)]
        return sorted(listed, key=lambda e: (e.published is not None, e.published.age if e.published else (0, 0)))

    def _look(self, name: str) -> Listed:
        path = self._root / name
        try:
            durable.check_directory(self._fs, path)
            if durable.exists(self._fs, path / CHECKPOINT) is None:
                return Listed(name, "unpublished")
            return Listed(name, "published", read_published(self._fs, path))
        except DamagedState as error:
            return Listed(name, "damaged", problem=Problem.of(error))
        except StorageUnavailable as error:
            return Listed(name, "unreadable", problem=Problem.of(error))

    def _latest(self) -> str | None:
        path = self._root.parent / LATEST
        if durable.exists(self._fs, path) is None:
            return None
        name = durable.read_small(self._fs, path, 4096).strip().decode("ascii", "replace")
        return name if is_safe_name(name) else None


def _of_run(listed: list[Listed], run_id: str | None) -> list[PublishedCheckpoint]:
    """The published checkpoints of a run (of any for None), oldest first."""
    found = [e.published for e in listed if e.published and run_id in (None, e.published.collection.run_id)]
    return sorted(found, key=lambda checkpoint: checkpoint.age)


def unreadable(listed: Iterable[Listed], than: PublishedCheckpoint | None) -> list[Problem]:
    """What cannot be read now of checkpoints that may be newer than `than` (None: of any)."""
    problems = [(e.checkpoint_id, e.problem) for e in listed if e.state == "unreadable" and e.problem is not None]
    return [p for name, p in problems if than is None or not _before(name, than.collection.sequence)]


def read_published(fs: FileSystem, path: PurePath) -> PublishedCheckpoint:
    """The checkpoint at `path`, its own two files checked; raises `DamagedState`. Blocking."""
    where = path / CHECKPOINT
    found = read_checkpoint_file(durable.read_small(fs, where), str(where))
    data = durable.read_small(fs, path / COLLECTION)
    _check_named(found, COLLECTION, data, path)
    collection = read_collection(data, str(path / COLLECTION))
    ours = (found.checkpoint_id, found.run_id, found.sequence, found.epoch, found.name)
    theirs = (collection.checkpoint_id, collection.run_id, collection.sequence, collection.epoch, collection.name)
    if ours != theirs or path.name != found.checkpoint_id:
        raise DamagedState(
            f"{where}: it does not agree with {COLLECTION}, or is of another checkpoint than {path.name}"
        )
    return PublishedCheckpoint(path, collection, found.participants(), found.size_bytes)


async def verify_checkpoint(
    fs: FileSystem, offload: Offload, checkpoint: PublishedCheckpoint, *, quick: bool = False
) -> list[Problem]:
    """All that is wrong with a checkpoint, participant by participant."""
    try:
        await offload.run(lambda: check_manifests(fs, checkpoint.path))
    except (DamagedState, StorageUnavailable) as error:
        return [Problem.of(error)]
    problems: list[Problem] = []
    holdings = Holdings(checkpoint.collection.continued)
    for kind, instance in checkpoint.participants:
        directory = checkpoint.directory(kind, instance)
        files = ParticipantFiles(fs, directory, kind=kind, instance=instance)
        wrong = await offload.run(partial(files.verify, quick=quick))
        if not wrong:
            try:
                check_owner(files, directory, checkpoint.checkpoint_id)
                await offload.run(partial(holdings.add, (kind, instance), files))
            except DamagedState as error:
                wrong = [Problem.of(error)]
        problems += wrong
    if not problems:
        problems = await offload.run(lambda: holdings.lacking(checkpoint.path / COLLECTION))
    return problems


def find_participants(fs: FileSystem, path: PurePath) -> Iterator[tuple[Kind, str]]:
    """(kind, instance) of every manifest below the checkpoint at `path`. Blocking."""
    durable.check_directory(fs, path)
    if durable.exists(fs, path / PARTICIPANTS) is None:
        return
    for kind in KINDS:
        directory = path / PARTICIPANTS / kind
        if durable.exists(fs, directory) is None:
            continue
        durable.check_directory(fs, directory)
        with durable.reading(directory):
            entries = fs.scan(directory)
        for entry in entries:
            if entry.kind == "directory" and is_safe_name(entry.name):
                if durable.exists(fs, directory / entry.name / MANIFEST) is not None:
                    yield kind, entry.name
                continue
            raise DamagedState(f"{directory / entry.name}: not the directory of a participant")


def check_part(fs: FileSystem, path: PurePath, kind: Kind, instance: str, checkpoint_id: str) -> tuple[NamedFile, int]:
    """A participant's manifest, found to be of this checkpoint with its files there; and their bytes. Blocking."""
    directory = path / PARTICIPANTS / kind / instance
    reader = ParticipantFiles(fs, directory, kind=kind, instance=instance)
    reader.open()
    check_owner(reader, directory, checkpoint_id)
    data = durable.read_small(fs, directory / MANIFEST)
    return _named(f"{PARTICIPANTS}/{kind}/{instance}/{MANIFEST}", data), len(data) + reader.stored_bytes


def check_owner(files: ParticipantFiles, directory: PurePath, checkpoint_id: str) -> None:
    """`DamagedState` unless the open `files` in `directory` say that they are of this checkpoint."""
    if files.checkpoint_id != checkpoint_id:
        raise DamagedState(f"{directory / MANIFEST}: it is of checkpoint {files.checkpoint_id}, not of {checkpoint_id}")


def _before(checkpoint_id: str, sequence: int) -> bool:
    """Whether it is one of ours, and older than `sequence`."""
    try:
        return checkpoint_sequence(checkpoint_id) < sequence
    except UsageError:
        return False


def _is_checkpoint_id(name: str) -> bool:
    try:
        return checkpoint_sequence(name) >= 0
    except UsageError:
        return False


def _named(path: str, data: bytes) -> NamedFile:
    return NamedFile(path=path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def check_manifests(fs: FileSystem, path: PurePath) -> None:
    """`DamagedState` unless every file that `CHECKPOINT.json` names is as it was. Blocking."""
    found = read_checkpoint_file(durable.read_small(fs, path / CHECKPOINT), str(path / CHECKPOINT))
    for file in found.files:
        for depth in range(1, len(PurePath(file.path).parts)):
            durable.check_directory(fs, path / PurePath(*PurePath(file.path).parts[:depth]))
        _check_named(found, file.path, durable.read_small(fs, path / file.path), path)


def _check_named(found: CheckpointFile, name: str, data: bytes, path: PurePath) -> None:
    fact = next(file for file in found.files if file.path == name)
    if len(data) != fact.bytes or hashlib.sha256(data).hexdigest() != fact.sha256:
        raise DamagedState(f"{path / name}: its bytes are not those that {CHECKPOINT} names")
