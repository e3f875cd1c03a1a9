"""A file system in memory that knows what a power cut may leave of it.

Nothing is durable until it is fsynced: a file's bytes by fsync of the file, a name by fsync of its directory. What is
not durable may be kept, dropped, torn, or left as zeros, one effect independently of the next.
"""

import errno
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from gymckpt.ports import Entry, Lock, WriteHandle

PAGE_BYTES = 512
"""Unsynced bytes survive or turn into zeros in pieces of this size."""

WRITING = frozenset(
    {
        "create", "append", "write", "fsync", "truncate", "link", "rename_exclusive", "replace", "unlink",
        "make_directory", "remove_directory", "fsync_directory",
    }
)  # fmt: skip
"""Operations that change something, or make it durable."""

Before = Callable[[str, PurePath], None]
"""Called with the operation and its path before it happens; what it raises happens instead."""


class PowerCut(BaseException):
    """The machine is gone. Not an `Exception`, so that no code under test goes on after it."""


@dataclass
class _File:
    inode: int
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    modified_s: float = 0.0
    symlink: bool = False


@dataclass
class _Directory:
    inode: int
    names: "dict[str, _Node]" = field(default_factory=dict)
    durable: "dict[str, _Node]" = field(default_factory=dict)
    pending: "list[dict[str, _Node | None]]" = field(default_factory=list)
    """Changes of names that are not durable, each atomic: name -> what it names now, None for nothing."""

    def change(self, change: "dict[str, _Node | None]") -> None:
        self.pending.append(change)
        _apply(self.names, change)


_Node = _File | _Directory


def _apply(names: dict[str, _Node], change: dict[str, _Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class MemoryFileSystem:
    """`ports.FileSystem` in memory. `before` may raise; `operations` counts what changed something."""

    def __init__(
        self, *, before: Before | None = None, capacity_bytes: int = 1 << 40, now: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.before = before
        self.capacity_bytes = capacity_bytes
        self.operations: list[tuple[str, PurePath]] = []
        self._now = now
        self._next_inode = 2
        self._root = _Directory(1)
        self._locks: set[PurePath] = set()
        self._dead = False

    # What a test or a simulation does

    def make_root(self, path: PurePath) -> None:
        """Directories that were there, durably, before anything began."""
        directory = self._root
        for name in path.parts[1:]:
            directory.names.setdefault(name, _Directory(self._inode()))
            child = directory.durable[name] = directory.names[name]
            assert isinstance(child, _Directory)
            directory = child

    def crashed(self, rng: random.Random | None) -> "MemoryFileSystem":
        """What may be there after a power cut now; with None everything that was not durable is gone."""
        survivor = MemoryFileSystem(capacity_bytes=self.capacity_bytes, now=self._now)
        survivor._next_inode = self._next_inode
        survivor._root = _survive_directory(self._root, rng, {})
        return survivor

    def restarted(self) -> "MemoryFileSystem":
        """The same files after all processes died but not the machine: nothing is lost, no lock is held."""
        survivor = MemoryFileSystem(capacity_bytes=self.capacity_bytes, now=self._now)
        survivor._next_inode, survivor._root = self._next_inode, self._root
        return survivor

    def die(self) -> None:
        """From now on every operation raises `PowerCut`."""
        self._dead = True

    def overwrite(self, path: PurePath, data: bytes) -> None:
        """Damage: put other bytes into the file itself, durably, through every name of it."""
        file = self._file(path)
        file.data, file.synced = bytearray(data), data

    def symlink(self, path: PurePath) -> None:
        """A symlink at `path`."""
        parent, name = self._parent(path)
        parent.change({name: _File(self._inode(), symlink=True)})
        parent.durable = dict(parent.names)

    def find(self, path: PurePath) -> bytes | None:
        """What a file holds; None if there is none. No operation of any process."""
        node: _Node | None = self._root
        for name in path.parts[1:]:
            node = node.names.get(name) if isinstance(node, _Directory) else None
        return bytes(node.data) if isinstance(node, _File) else None

    def tree(self, below: PurePath | None = None) -> dict[str, bytes]:
        """Every file below a directory by its path."""
        found: dict[str, bytes] = {}

        def walk(directory: _Directory, path: PurePath) -> None:
            for name, node in directory.names.items():
                if isinstance(node, _Directory):
                    walk(node, path / name)
                else:
                    found[str(path / name)] = bytes(node.data)

        below = below or PurePath("/")
        start: _Node | None = self._root
        for name in below.parts[1:]:
            start = start.names.get(name) if isinstance(start, _Directory) else None
        if isinstance(start, _Directory):
            walk(start, below)
        return found

    @property
    def used_bytes(self) -> int:
        """Of all files, each counted once."""
        return sum(len(file.data) for file in self._inodes())

    # ports.FileSystem

    def create(self, path: PurePath) -> WriteHandle:
        parent, name = self._begin("create", path)
        if name in parent.names:
            raise _error(errno.EEXIST, path)
        file = _File(self._inode(), modified_s=self._now())
        parent.change({name: file})
        return _Handle(self, file, path)

    def append(self, path: PurePath) -> WriteHandle:
        self._begin("append", path)
        return _Handle(self, self._file(path), path)

    def truncate(self, path: PurePath, length: int) -> None:
        self._begin("truncate", path)
        file = self._file(path)
        del file.data[length:]
        file.data.extend(bytes(length - len(file.data)))
        file.synced = bytes(file.data)

    def link(self, source: PurePath, target: PurePath) -> None:
        parent, name = self._begin("link", target)
        file = self._file(source)
        if name in parent.names:
            raise _error(errno.EEXIST, target)
        parent.change({name: file})

    def rename_exclusive(self, source: PurePath, target: PurePath) -> None:
        parent, name = self._begin("rename_exclusive", target)
        if name in parent.names:
            raise _error(errno.EEXIST, target)
        self._rename(source, parent, name)

    def replace(self, source: PurePath, target: PurePath) -> None:
        parent, name = self._begin("replace", target)
        self._rename(source, parent, name)

    def unlink(self, path: PurePath) -> None:
        parent, name = self._begin("unlink", path)
        node = parent.names.get(name)
        if node is None:
            raise _error(errno.ENOENT, path)
        if isinstance(node, _Directory):
            raise _error(errno.EISDIR, path)
        parent.change({name: None})

    def make_directory(self, path: PurePath) -> None:
        parent, name = self._begin("make_directory", path)
        if name in parent.names:
            raise _error(errno.EEXIST, path)
        parent.change({name: _Directory(self._inode())})

    def remove_directory(self, path: PurePath) -> None:
        parent, name = self._begin("remove_directory", path)
        if self._directory(path).names:
            raise _error(errno.ENOTEMPTY, path)
        parent.change({name: None})

    def fsync_directory(self, path: PurePath) -> None:
        self._begin("fsync_directory", path)
        directory = self._directory(path)
        directory.durable, directory.pending = dict(directory.names), []

    def read(self, path: PurePath, offset: int = 0, length: int = -1) -> bytes:
        self._begin("read", path)
        data = self._file(path).data
        return bytes(data[offset:] if length < 0 else data[offset : offset + length])

    def read_parts(self, path: PurePath, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        self._begin("read", path)
        data = self._file(path).data
        return [bytes(data[offset : offset + length]) for offset, length in parts]

    def stat(self, path: PurePath) -> Entry:
        parent, name = self._begin("stat", path)
        if path == path.parent:
            return Entry("/", "directory", 0)
        if name not in parent.names:
            raise _error(errno.ENOENT, path)
        return _entry(name, parent.names[name])

    def scan(self, directory: PurePath) -> list[Entry]:
        self._begin("scan", directory)
        names = self._directory(directory).names
        return [_entry(name, names[name]) for name in sorted(names)]

    def free_bytes(self, path: PurePath) -> int:
        self._begin("free_bytes", path)
        return max(0, self.capacity_bytes - self.used_bytes)

    def lock(self, path: PurePath) -> Lock:
        parent, name = self._begin("lock", path)
        if path in self._locks:
            raise _error(errno.EAGAIN, path)
        if name not in parent.names:
            parent.change({name: _File(self._inode())})
        self._locks.add(path)
        return _MemoryLock(self._locks, path)

    # Inside

    def passing(self, operation: str, path: PurePath) -> None:
        """Called before every operation."""
        if self._dead:
            raise PowerCut
        if self.before is not None:
            self.before(operation, path)
        if operation in WRITING:
            self.operations.append((operation, path))

    def room(self) -> int:
        """Bytes that can still be written."""
        return self.capacity_bytes - self.used_bytes if self.capacity_bytes < 1 << 40 else 1 << 40

    def now(self) -> float:
        return self._now()

    def _begin(self, operation: str, path: PurePath) -> tuple[_Directory, str]:
        self.passing(operation, path)
        return self._parent(path)

    def _inode(self) -> int:
        self._next_inode += 1
        return self._next_inode

    def _parent(self, path: PurePath) -> tuple[_Directory, str]:
        return self._directory(path.parent), path.name

    def _directory(self, path: PurePath) -> _Directory:
        directory = self._root
        for name in path.parts[1:]:
            child = directory.names.get(name)
            if child is None:
                raise _error(errno.ENOENT, path)
            if not isinstance(child, _Directory):
                raise _error(errno.ENOTDIR, path)
            directory = child
        return directory

    def _file(self, path: PurePath) -> _File:
        parent, name = self._parent(path)
        node = parent.names.get(name)
        if node is None:
            raise _error(errno.ENOENT, path)
        if isinstance(node, _Directory):
            raise _error(errno.EISDIR, path)
        if node.symlink:
            raise _error(errno.ELOOP, path)
        return node

    def _rename(self, source: PurePath, parent: _Directory, name: str) -> None:
        file = self._file(source)
        origin, before = self._parent(source)
        if origin is parent:
            parent.change({name: file, before: None})
        else:
            parent.change({name: file})
            origin.change({before: None})

    def _inodes(self) -> list[_File]:
        files: dict[int, _File] = {}

        def walk(directory: _Directory) -> None:
            for node in directory.names.values():
                if isinstance(node, _Directory):
                    walk(node)
                else:
                    files[node.inode] = node

        walk(self._root)
        return list(files.values())


class _Handle:
    def __init__(self, fs: MemoryFileSystem, file: _File, path: PurePath) -> None:
        self._fs = fs
        self._file = file
        self._path = path

    def write(self, data: bytes) -> None:
        self._fs.passing("write", self._path)
        room = self._fs.room()
        self._file.data.extend(data[: max(0, room)])
        self._file.modified_s = self._fs.now()
        if len(data) > room:
            raise _error(errno.ENOSPC, self._path)

    def fsync(self) -> None:
        self._fs.passing("fsync", self._path)
        self._file.synced = bytes(self._file.data)

    def close(self) -> None:
        pass


class _MemoryLock:
    def __init__(self, held: set[PurePath], path: PurePath) -> None:
        self._held = held
        self._path = path

    def release(self) -> None:
        self._held.discard(self._path)


def _error(code: int, path: PurePath) -> OSError:
    return OSError(code, os.strerror(code), str(path))


def _entry(name: str, node: _Node) -> Entry:
    if isinstance(node, _Directory):
        return Entry(name, "directory", 0, 0.0, node.inode)
    return Entry(name, "other" if node.symlink else "file", len(node.data), node.modified_s, node.inode)


def _survive_directory(directory: _Directory, rng: random.Random | None, seen: dict[int, _Node]) -> _Directory:
    names = dict(directory.durable)
    for change in directory.pending:
        if rng is not None and rng.random() < 0.5:
            _apply(names, change)
    survivor = _Directory(directory.inode)
    seen[directory.inode] = survivor
    for name, node in names.items():
        kept = seen.get(node.inode)
        if kept is None:
            kept = _survive_directory(node, rng, seen) if isinstance(node, _Directory) else _survive_file(node, rng)
            seen[node.inode] = kept
        survivor.names[name] = survivor.durable[name] = kept
    return survivor


def _survive_file(file: _File, rng: random.Random | None) -> _File:
    data = file.synced
    if rng is not None and bytes(file.data) != file.synced:
        data = _torn(file.synced, bytes(file.data), rng)
    return _File(file.inode, bytearray(data), data, file.modified_s, file.symlink)


def _torn(synced: bytes, written: bytes, rng: random.Random) -> bytes:
    """Unsynced bytes after a power cut: none, all, the first of them, or some pages as zeros."""
    match rng.randrange(4):
        case 0:
            return synced
        case 1:
            return written
        case 2:
            return written[: rng.randint(len(synced), len(written))] if len(written) > len(synced) else synced
        case _:
            torn = bytearray(written)
            for start in range(len(synced), len(written), PAGE_BYTES):
                if rng.random() < 0.5:
                    end = min(start + PAGE_BYTES, len(written))
                    torn[start:end] = bytes(end - start)
            return bytes(torn)
