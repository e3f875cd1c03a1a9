"""Durable steps made of single file operations, in the one order that survives a power cut; their errors by name."""

import errno
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePath

from gymckpt.crashpoints import crash_point
from gymckpt.errors import DamagedState, NoSpace, NotAsAsked, StorageFailed, StorageUnavailable
from gymckpt.ports import Entry, FileSystem, WriteHandle

NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
"""What `link` fails with where a second name is not possible."""

SMALL_FILE_BYTES = 64 << 20
"""No file that is read in one piece may be larger."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR})
_NOT_OURS = frozenset({errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO})


@contextmanager
def writing(path: PurePath) -> Iterator[None]:
    """Name what goes wrong in writing: `NoSpace`, `StorageFailed` (EIO), else `StorageUnavailable`."""
    try:
        yield
    except OSError as error:
        raise write_error(error, path) from error


def write_error(error: OSError, path: PurePath) -> NoSpace | StorageFailed | StorageUnavailable:
    """The error of the tree for an `OSError` met in writing `path`."""
    if error.errno in _FULL:
        return NoSpace(f"no space to write {path}: {error.strerror}", hint="free space, then go on")
    if error.errno == errno.EIO:
        return StorageFailed(f"writing {path} failed: {error.strerror}")
    return StorageUnavailable(f"cannot write {path}: {error.strerror or error}")


@contextmanager
def reading(path: PurePath) -> Iterator[None]:
    """Name what goes wrong in reading a file that must be there: absent or not a file is damage, the rest may pass."""
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_THERE:
            raise DamagedState(f"{path} is missing") from error
        if error.errno in _NOT_OURS:
            raise DamagedState(f"{path} is not a regular file") from error
        raise StorageUnavailable(f"cannot read {path}: {error.strerror or error}") from error


def sync(handle: WriteHandle, path: PurePath) -> None:
    """fsync; any failure is `StorageFailed`, for what reached the disk is unknown then."""
    try:
        handle.fsync()
    except OSError as error:
        raise StorageFailed(f"fsync of {path} failed: {error.strerror or error}") from error


def sync_directory(fs: FileSystem, path: PurePath) -> None:
    """fsync of a directory; any failure is `StorageFailed`."""
    try:
        fs.fsync_directory(path)
    except OSError as error:
        raise StorageFailed(f"fsync of directory {path} failed: {error.strerror or error}") from error


def read_small(fs: FileSystem, path: PurePath, limit_bytes: int = SMALL_FILE_BYTES) -> bytes:
    """All of a file, which must be there and no larger than `limit_bytes`."""
    with reading(path):
        size = fs.stat(path).size_bytes
        if size > limit_bytes:
            raise DamagedState(f"{path} has {size} bytes, more than the {limit_bytes} that such a file may have")
        return fs.read(path, 0, limit_bytes)


def exists(fs: FileSystem, path: PurePath) -> Entry | None:
    """What stands at `path`, or None."""
    try:
        return fs.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageUnavailable(f"cannot look at {path}: {error.strerror or error}") from error


def temporary_name(path: PurePath) -> PurePath:
    """A name beside `path` that no other writer chooses and no reader looks at."""
    return path.with_name(f".{path.name[:64]}.{secrets.token_hex(8)}.tmp")


def is_temporary(name: str) -> bool:
    """Whether `name` was made by `temporary_name`."""
    return name.startswith(".") and name.endswith(".tmp")


def write_temporary(fs: FileSystem, path: PurePath, data: bytes, before_fsync: str | None = None) -> PurePath:
    """`data` in a fsynced temporary file beside `path`; nothing is left behind on failure."""
    temporary = temporary_name(path)
    try:
        with writing(path):
            handle = fs.create(temporary)
            try:
                handle.write(data)
                if before_fsync:
                    crash_point(before_fsync)
                sync(handle, path)
            finally:
                handle.close()
    except BaseException:
        remove_quietly(fs, temporary)
        raise
    return temporary


def name_finally(fs: FileSystem, temporary: PurePath, path: PurePath) -> None:
    """Give a fsynced temporary file its final name too. Identical content there is fine, other is `NotAsAsked`."""
    with writing(path):
        try:
            fs.link(temporary, path)
        except FileExistsError:
            _same_content(fs, temporary, path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            try:
                fs.rename_exclusive(temporary, path)
            except FileExistsError:
                _same_content(fs, temporary, path)


def _same_content(fs: FileSystem, temporary: PurePath, path: PurePath) -> None:
    ours, theirs = fs.stat(temporary), fs.stat(path)
    if theirs.kind == "file" and ours.inode == theirs.inode and ours.inode:
        return
    same = theirs.kind == "file" and ours.size_bytes == theirs.size_bytes
    offset, chunk = 0, 8 << 20
    while same and offset < ours.size_bytes:
        same = fs.read(temporary, offset, chunk) == fs.read(path, offset, chunk)
        offset += chunk
    if not same:
        raise NotAsAsked(f"{path} exists with other content")


def write_new(fs: FileSystem, path: PurePath, data: bytes) -> None:
    """A new durable file, whole or not at all. Identical content there already is fine; other content: `NotAsAsked`."""
    temporary = write_temporary(fs, path, data)
    try:
        name_finally(fs, temporary, path)
    finally:
        remove_quietly(fs, temporary)
    sync_directory(fs, path.parent)


def replace_file(fs: FileSystem, path: PurePath, data: bytes, before_replace: str | None = None) -> None:
    """Put a durable file in the place of another: for `LATEST` and status files only."""
    temporary = write_temporary(fs, path, data)
    try:
        if before_replace:
            crash_point(before_replace)
        with writing(path):
            fs.replace(temporary, path)
    except BaseException:
        remove_quietly(fs, temporary)
        raise
    sync_directory(fs, path.parent)


def make_directories(fs: FileSystem, path: PurePath) -> None:
    """`path` and what is missing above it, durable. `NotAsAsked` where something else is in the way."""
    missing: list[PurePath] = []
    while (entry := exists(fs, path)) is None and path != path.parent:
        missing.append(path)
        path = path.parent
    if entry is not None and entry.kind == "file":
        raise NotAsAsked(f"{path} is not a directory")
    for directory in reversed(missing):
        with writing(directory), suppress(FileExistsError):
            fs.make_directory(directory)
        sync_directory(fs, directory.parent)


def check_directory(fs: FileSystem, path: PurePath) -> None:
    """`DamagedState` unless a real directory stands at `path` (a symlink is none)."""
    entry = exists(fs, path)
    if entry is None:
        raise DamagedState(f"{path} is missing")
    if entry.kind != "directory":
        raise DamagedState(f"{path} is not a directory")


def remove_quietly(fs: FileSystem, path: PurePath) -> None:
    """Unlink, if it can be done: for temporaries, which are rubbish anyway."""
    with suppress(OSError):
        fs.unlink(path)


def remove_tree(fs: FileSystem, path: PurePath, first: str | None = None) -> None:
    """Remove a directory and all in it, never following a symlink; the file `first` goes first, durably."""
    with writing(path):
        if first is not None:
            with suppress(FileNotFoundError):
                fs.unlink(path / first)
                fs.fsync_directory(path)
        _remove(fs, path)
        fs.fsync_directory(path.parent)


def _remove(fs: FileSystem, path: PurePath) -> None:
    for entry in fs.scan(path):
        if entry.kind == "directory":
            _remove(fs, path / entry.name)
        else:
            fs.unlink(path / entry.name)
    fs.remove_directory(path)


def check_space(
    fs: FileSystem, path: PurePath, needed_bytes: int, hint: str = "free space, or keep fewer checkpoints"
) -> None:
    """`NoSpace` unless the file system of `path` has room for `needed_bytes`."""
    with reading(path):
        free = fs.free_bytes(path)
    if free < needed_bytes:
        raise NoSpace(
            f"no space for {path}: {free} bytes are free, about {needed_bytes} are needed",
            hint=hint,
        )
