"""A file that a user names: it has its name once it is whole, and is never written over another."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from gymckpt.errors import NotAsAsked, UsageError
from gymckpt.ports import WriteHandle
from gymckpt.storage import durable
from gymckpt.storage.files import LocalFileSystem


class Sink(Protocol):
    """Where bytes go."""

    def write(self, data: bytes, /) -> object: ...


class _Written:
    def __init__(self, handle: WriteHandle, path: Path) -> None:
        self._handle = handle
        self._path = path

    def write(self, data: bytes, /) -> int:
        with durable.writing(self._path):
            self._handle.write(data)
        return len(data)


@contextmanager
def new_file(path: Path) -> Iterator[Sink]:
    """What is written gets the name `path` on leaving, durably; nothing of it stays after an error.

    Raises `NotAsAsked` if the name is taken, `UsageError` for a place where no file can be made, `NoSpace` and the
    other errors of writing.
    """
    if os.path.lexists(path):
        raise NotAsAsked(f"{path} exists", hint="nothing was overwritten; give another name")
    fs, temporary = LocalFileSystem(), Path(durable.temporary_name(path))
    try:
        temporary.touch(exist_ok=False)  # with the permissions that the user's other files have
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise durable.write_error(error, path) from error
        raise UsageError(f"{path}: {error.strerror}", hint="give a place where a file can be made") from error
    try:
        handle = fs.append(temporary)
        try:
            yield _Written(handle, path)
            durable.sync(handle, path)
        finally:
            handle.close()
        durable.name_finally(fs, temporary, path)
        durable.sync_directory(fs, path.parent)
    finally:
        durable.remove_quietly(fs, temporary)
