"""The one place that opens, fsyncs, links and renames files.

A new file is durable and whole, or not there: temporary name in the same directory, fsync, hard link to the final name
(which fails if it is taken, so of two racing writers exactly one wins), fsync of the directory. Nothing is ever
replaced but `LATEST` and status files.
"""

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePath

from gymckpt.ports import Entry, Lock, WriteHandle
from gymckpt.storage.durable import replace_file, write_new

__all__ = ["LocalFileSystem", "replace_file", "write_new"]

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


class _Handle:
    """A file that only grows."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def fsync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class _FileLock:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class LocalFileSystem:
    """`ports.FileSystem` on the machine's own file systems. Files 0600 and directories 0700, or 0640 and 0750."""

    def __init__(self, *, group_readable: bool = False) -> None:
        self._file_mode = 0o640 if group_readable else 0o600
        self._directory_mode = 0o750 if group_readable else 0o700

    def create(self, path: PurePath) -> WriteHandle:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return _Handle(os.open(path, flags, self._file_mode))

    def append(self, path: PurePath) -> WriteHandle:
        return _Handle(_open_regular(path, os.O_WRONLY | os.O_APPEND))

    def truncate(self, path: PurePath, length: int) -> None:
        fd = _open_regular(path, os.O_WRONLY)
        try:
            os.ftruncate(fd, length)
            os.fsync(fd)
        finally:
            os.close(fd)

    def link(self, source: PurePath, target: PurePath) -> None:
        os.link(source, target, follow_symlinks=False)

    def rename_exclusive(self, source: PurePath, target: PurePath) -> None:
        renameat2 = getattr(_LIBC, "renameat2", None)
        if renameat2 is not None:
            names = os.fsencode(source), os.fsencode(target)
            if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE) == 0:
                return
            code = ctypes.get_errno()
            if code not in (errno.ENOSYS, errno.EINVAL):
                raise OSError(code, os.strerror(code), str(target))
        # Neither links nor an exclusive rename here: looking first leaves a gap, but it is the best that there is.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        Path(source).rename(target)

    def replace(self, source: PurePath, target: PurePath) -> None:
        Path(source).replace(target)

    def unlink(self, path: PurePath) -> None:
        Path(path).unlink()

    def make_directory(self, path: PurePath) -> None:
        Path(path).mkdir(self._directory_mode)

    def remove_directory(self, path: PurePath) -> None:
        Path(path).rmdir()

    def fsync_directory(self, path: PurePath) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: PurePath, offset: int = 0, length: int = -1) -> bytes:
        fd = _open_regular(path, os.O_RDONLY)
        try:
            wanted = os.fstat(fd).st_size - offset
            return _read_at(fd, offset, max(0, wanted if length < 0 else min(wanted, length)))
        finally:
            os.close(fd)

    def read_parts(self, path: PurePath, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        fd = _open_regular(path, os.O_RDONLY)
        try:
            return [_read_at(fd, offset, length) for offset, length in parts]
        finally:
            os.close(fd)

    def stat(self, path: PurePath) -> Entry:
        return _entry(PurePath(path).name, os.lstat(path))

    def scan(self, directory: PurePath) -> list[Entry]:
        with os.scandir(directory) as entries:
            return sorted((_entry(e.name, e.stat(follow_symlinks=False)) for e in entries), key=lambda e: e.name)

    def free_bytes(self, path: PurePath) -> int:
        usage = os.statvfs(path)
        return usage.f_bavail * usage.f_frsize

    def lock(self, path: PurePath) -> Lock:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, self._file_mode)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return _FileLock(fd)


def _open_regular(path: PurePath, flags: int) -> int:
    """A descriptor of a regular file; a pipe or device at that name would block or worse, so it is refused."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def _read_at(fd: int, offset: int, length: int) -> bytes:
    chunks: list[bytes] = []
    while length > 0:
        chunk = os.pread(fd, min(length, 1 << 30), offset)
        if not chunk:
            break
        chunks.append(chunk)
        offset, length = offset + len(chunk), length - len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _entry(name: str, info: os.stat_result) -> Entry:
    if stat.S_ISREG(info.st_mode):
        return Entry(name, "file", info.st_size, info.st_mtime, info.st_ino)
    return Entry(name, "directory" if stat.S_ISDIR(info.st_mode) else "other", 0, info.st_mtime, info.st_ino)
