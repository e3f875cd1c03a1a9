"""What a participant stored last, so that its next commit writes only what is new; and keeping hold of those files."""

import errno
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from gymckpt.errors import DamagedState
from gymckpt.identity import EpisodeId
from gymckpt.ports import FileSystem
from gymckpt.storage.durable import NO_LINKS, remove_quietly, sync, temporary_name, writing
from gymckpt.storage.manifest import FileFact, Segment
from gymckpt.storage.parts import Chain

_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
_CHUNK_BYTES = 8 << 20

NameFinally = Callable[[PurePath, PurePath], None]
"""Gives a fsynced temporary file its final name."""


@dataclass(frozen=True, slots=True)
class Base:
    """The last checkpoint that a participant committed or was restored from.

    Its directory may be gone by the next commit: what can no longer be linked is written again.
    """

    directory: PurePath
    segments: tuple[Segment, ...]
    chains: Mapping[EpisodeId, Chain]
    new_bytes: int = 0
    """What that commit added to the disk: the next one is expected to need about as much."""
    lost: set[str] = field(default_factory=set)
    """Segment files found damaged since: not used again."""


def hold(fs: FileSystem, base: Base, directory: PurePath, name_finally: NameFinally) -> list[bool]:
    """Link every segment of `base` into `directory` (copy it where links are not possible); which of them are there."""
    return [
        segment.file not in base.lost
        and _hold(fs, base.directory / segment.file, directory, segment.fact, name_finally)
        for segment in base.segments
    ]


def _hold(fs: FileSystem, source: PurePath, directory: PurePath, fact: FileFact, name_finally: NameFinally) -> bool:
    target = directory / fact.file
    with writing(target):
        try:
            fs.link(source, target)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno in _GONE:
                return False
            if error.errno not in NO_LINKS:
                raise
            return _copy(fs, source, target, fact, name_finally)
        entry = fs.stat(target)
        if entry.kind == "file" and entry.size_bytes == fact.bytes:
            return True
        remove_quietly(fs, target)
        return False


def _copy(fs: FileSystem, source: PurePath, target: PurePath, fact: FileFact, name_finally: NameFinally) -> bool:
    """A copy under its final name, unless `source` is gone or not what it was."""
    temporary = temporary_name(target)
    try:
        with writing(target):
            handle = fs.create(temporary)
            try:
                digest = hashlib.sha256()
                for offset in range(0, fact.bytes, _CHUNK_BYTES):
                    chunk = fs.read(source, offset, min(_CHUNK_BYTES, fact.bytes - offset))
                    digest.update(chunk)
                    handle.write(chunk)
                if digest.hexdigest() != fact.sha256:
                    return False
                sync(handle, target)
            finally:
                handle.close()
        name_finally(temporary, target)
        return True
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise
    finally:
        remove_quietly(fs, temporary)


def lose(base: Base, file: str, error: DamagedState) -> None:
    """Remember that a segment is damaged, so that the next commit writes its episodes again; raises `error`."""
    base.lost.add(file)
    raise error
