"""The thin edge: time, files, threads and HTTP as protocols, so that the same code runs for real and in a simulation.

Production: `SystemClock` and `ThreadOffload` here, `storage.files.LocalFileSystem`, `wire.client.HttpTransport`.
Simulated: `tests/simulation`.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Time. Everything is measured on `monotonic`; `time` is for `deadline_ts` on the wire and for people."""

    def monotonic(self) -> float:
        """Seconds, never going back."""
        ...

    def time(self) -> float:
        """Unix seconds."""
        ...

    async def sleep_until(self, monotonic_s: float) -> None:
        """Return once `monotonic()` has reached `monotonic_s`."""
        ...


class SystemClock:
    """The machine's clock; `monotonic` is the running event loop's own time base."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    async def sleep_until(self, monotonic_s: float) -> None:
        await asyncio.sleep(max(0.0, monotonic_s - self.monotonic()))


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on a clock's `monotonic` after which an answer is of no use."""

    clock: Clock
    at_s: float

    @classmethod
    def after(cls, clock: Clock, seconds: float) -> "Deadline":
        """The deadline `seconds` from now."""
        return cls(clock, clock.monotonic() + seconds)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.at_s - self.clock.monotonic())

    @property
    def passed(self) -> bool:
        return self.remaining_s <= 0.0

    def earliest(self, seconds: float) -> "Deadline":
        """This deadline, or `seconds` from now if that comes first."""
        return Deadline(self.clock, min(self.at_s, self.clock.monotonic() + seconds))


class Offload(Protocol):
    """Where blocking work goes: compression, digests, fsync, big JSON. Threads in production, inline when simulated."""

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` off the event loop. Cancelling the caller does not stop work that has begun."""
        ...


class ThreadOffload:
    """Offloads to an executor, by default to threads of its own: those of the event loop belong to everyone's code, and
    calls that never end there must not keep a file from being written."""

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor or ThreadPoolExecutor(thread_name_prefix="gymckpt")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory; symlinks are reported as `other`, never followed."""

    name: str
    kind: Literal["file", "directory", "other"]
    size_bytes: int
    modified_s: float = 0.0
    inode: int = 0


class WriteHandle(Protocol):
    """An open file that only grows."""

    def write(self, data: bytes) -> None:
        """Write all of `data`."""
        ...

    def fsync(self) -> None:
        """Make what was written durable; a failure is final for this handle."""
        ...

    def close(self) -> None: ...


class Lock(Protocol):
    """An advisory lock that the operating system drops when its holder dies."""

    def release(self) -> None: ...


class FileSystem(Protocol):
    """The only way to durable bytes. Blocking: call it through `Offload`. Raises `OSError` as the system does.

    No call follows a symlink in the last component of a path.
    """

    def create(self, path: PurePath) -> WriteHandle:
        """A new file (0600); `FileExistsError` if the name is taken."""
        ...

    def append(self, path: PurePath) -> WriteHandle:
        """Open an existing regular file to write at its end."""
        ...

    def truncate(self, path: PurePath, length: int) -> None:
        """Cut to `length` bytes and fsync."""
        ...

    def link(self, source: PurePath, target: PurePath) -> None:
        """A second name for the same file; `FileExistsError` if `target` is taken."""
        ...

    def rename_exclusive(self, source: PurePath, target: PurePath) -> None:
        """Rename, where links are missing; `FileExistsError` if `target` is taken."""
        ...

    def replace(self, source: PurePath, target: PurePath) -> None:
        """Rename over `target`."""
        ...

    def unlink(self, path: PurePath) -> None: ...

    def make_directory(self, path: PurePath) -> None:
        """One new directory (0700); `FileExistsError` if the name is taken."""
        ...

    def remove_directory(self, path: PurePath) -> None:
        """Remove an empty directory."""
        ...

    def fsync_directory(self, path: PurePath) -> None: ...

    def read(self, path: PurePath, offset: int = 0, length: int = -1) -> bytes:
        """Up to `length` bytes from `offset` (to the end for -1) of a regular file."""
        ...

    def read_parts(self, path: PurePath, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        """As `read` does, for several (offset, length) of one file."""
        ...

    def stat(self, path: PurePath) -> Entry:
        """What stands at `path`; `FileNotFoundError` if nothing does."""
        ...

    def scan(self, directory: PurePath) -> list[Entry]:
        """The names in `directory`, sorted."""
        ...

    def free_bytes(self, path: PurePath) -> int:
        """Bytes that an unprivileged writer can still store beside `path`."""
        ...

    def lock(self, path: PurePath) -> Lock:
        """Take the lock file `path` (made if missing) without waiting; `BlockingIOError` if another holds it."""
        ...


@dataclass(frozen=True, slots=True)
class ServerRef:
    """A server as a caller sees it: a unique instance name and its base URL (no trailing slash)."""

    instance: str
    url: str


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP reply, read whole. `headers` has lower-case names; repeated ones are joined with `, `."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cookies: Mapping[str, str] = field(default_factory=dict)
    """Cookies that this reply set, by name."""


class Transport(Protocol):
    """One HTTP exchange, bounded by a deadline. Keeps no cookies of its own."""

    async def call(
        self,
        server: ServerRef,
        method: str,
        path: str,
        body: Any = None,
        *,
        deadline: Deadline,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send `body` as JSON (bytes are sent as they are; None sends none) and read the reply.

        Raises `NotSent` if the request provably reached nobody (connection refused), `DeadlinePassed` at the
        deadline, and `ServerError` for a connection that broke: then nobody knows whether it was received.
        """
        ...
