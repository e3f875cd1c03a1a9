"""One holder a run: an operating system lock, a record of who holds it, a heartbeat, and an epoch that only rises.

The system's lock settles races on one machine. The record settles what it cannot: holders on other machines, and a
holder that was stopped, robbed with `--steal-lock`, and wakes up later. Only a taking writes the record, so a late
heartbeat of the robbed one can hide nothing; each holder looks at it before it publishes, retires or journals.
"""

import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gymckpt import jsoncodec
from gymckpt.collection.rundirectory import RunPaths
from gymckpt.errors import DamagedState, GymckptError, NotAsAsked, StorageUnavailable
from gymckpt.ports import Clock, FileSystem, Lock, Offload
from gymckpt.storage.durable import exists, read_small, replace_file

HEARTBEAT_S = 5.0
STALE_S = 60.0
"""A holder on another machine whose heartbeat stands still for so long is taken for dead."""
_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Holder:
    """A process: `start` tells it from an earlier one of the same pid (None where the system does not say)."""

    host: str
    pid: int
    start: str | None = None

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"


def this_process() -> Holder:
    """The calling process."""
    return Holder(socket.gethostname(), os.getpid(), process_start(os.getpid()))


def process_start(pid: int) -> str | None:
    """When the process started, in the system's own units; None if there is no such process, or no such knowledge."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def process_lives(holder: Holder) -> bool:
    """Whether that very process of this machine is there, running or stopped."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    start = process_start(holder.pid)
    return holder.start is None or start is None or start == holder.start


@dataclass(frozen=True, slots=True)
class Taken:
    """What LOCK says."""

    holder: Holder
    epoch: int
    nonce: str
    taken_at: float


class RunLock:
    """Holds one run for one process."""

    def __init__(
        self,
        fs: FileSystem,
        offload: Offload,
        clock: Clock,
        paths: RunPaths,
        *,
        holder: Holder | None = None,
        lives: Callable[[Holder], bool] = process_lives,
    ) -> None:
        self._fs = fs
        self._offload = offload
        self._clock = clock
        self._paths = paths
        self._holder = holder or this_process()
        self._lives = lives
        self._nonce = secrets.token_hex(8)
        self._system: Lock | None = None
        self._beats = 0
        self.epoch = 0

    @property
    def holder(self) -> Holder:
        return self._holder

    async def take(self, *, steal: bool = False, recorded: bool = True) -> int:
        """Take the run and give the new epoch. Raises `NotAsAsked` naming the holder if it is alive and not to be
        robbed. A holder on another machine is watched for up to a minute before it is taken for dead.

        Not `recorded`: only processes of this machine are kept out, and nothing is written: for a full disk.
        """
        system = await self._offload.run(self._system_lock)
        try:
            taken = await self._offload.run(self._read)
            if not steal:
                if system is None:
                    raise self._refusal(taken)
                if taken is not None and await self._alive(taken):
                    raise self._refusal(taken)
            self.epoch = await self._offload.run(lambda: self._newest_epoch(taken) + 1)
            if recorded:
                await self._offload.run(self._write)
        except BaseException:
            if system is not None:
                system.release()
            raise
        self._system = system
        return self.epoch

    async def is_let_go(self) -> bool:
        """Whether nobody holds the run for certain: the silence of another machine proves nothing."""
        taken = await self._offload.run(self._read)
        if taken is None or await self._offload.run(lambda: self._released(taken)):
            return True
        return taken.holder.host == self._holder.host and not self._lives(taken.holder)

    def _system_lock(self) -> Lock | None:
        try:
            return self._fs.lock(self._paths.held)
        except BlockingIOError:
            return None
        except OSError as error:
            raise StorageUnavailable(f"cannot lock {self._paths.held}: {error.strerror or error}") from error

    def _refusal(self, taken: Taken | None) -> NotAsAsked:
        who = str(taken.holder) if taken else "another process"
        return NotAsAsked(
            f"{self._paths.root} is held by {who}",
            hint="wait for it, or stop it; --steal-lock takes the run from a holder that cannot be stopped",
        )

    async def _alive(self, taken: Taken) -> bool:
        if taken.holder == self._holder:
            return False
        if taken.holder.host == self._holder.host:
            return self._lives(taken.holder) and not await self._offload.run(lambda: self._released(taken))
        return await self._beats_on(taken)

    async def _beats_on(self, taken: Taken) -> bool:
        """Watch a heartbeat from another machine on our own clock: two wall clocks prove nothing together."""
        first = await self._offload.run(self._heartbeat)
        if first.get("epoch") == taken.epoch and first.get("released"):
            return False
        until = self._clock.monotonic() + STALE_S
        while self._clock.monotonic() < until:
            await self._clock.sleep_until(self._clock.monotonic() + HEARTBEAT_S)
            if await self._offload.run(self._heartbeat) != first:
                return True
        return False

    def _released(self, taken: Taken) -> bool:
        beat = self._heartbeat()
        return beat.get("nonce") == taken.nonce and bool(beat.get("released"))

    def _heartbeat(self) -> dict[str, Any]:
        try:
            if exists(self._fs, self._paths.heartbeat) is None:
                return {}
            value = jsoncodec.loads(read_small(self._fs, self._paths.heartbeat, _LIMIT_BYTES))
        except (ValueError, DamagedState):
            return {}
        return value if isinstance(value, dict) else {}

    def _read(self) -> Taken | None:
        if exists(self._fs, self._paths.lock) is None:
            return None
        try:
            value = jsoncodec.loads(read_small(self._fs, self._paths.lock, _LIMIT_BYTES))
            holder = Holder(str(value["host"]), int(value["pid"]), value["start"])
            return Taken(holder, int(value["epoch"]), str(value["nonce"]), float(value["taken_at"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedState(f"{self._paths.lock} cannot be read: {error!r}") from error

    def _newest_epoch(self, taken: Taken | None) -> int:
        journals = self._fs.scan(self._paths.journal) if exists(self._fs, self._paths.journal) else []
        epochs = [int(part[1]) for file in journals if len(part := file.name.split("-")) == 3 and part[1].isdecimal()]
        return max([taken.epoch if taken else 0, *epochs])

    def _write(self) -> None:
        record = {**asdict(self._holder), "epoch": self.epoch, "nonce": self._nonce, "taken_at": self._clock.time()}
        replace_file(self._fs, self._paths.lock, jsoncodec.dumps(record) + b"\n")
        self._beat(released=False)

    def _beat(self, *, released: bool) -> None:
        self._beats += 1
        beat = {"epoch": self.epoch, "nonce": self._nonce, "beat": self._beats, "at": self._clock.time()}
        replace_file(
            self._fs, self._paths.heartbeat, jsoncodec.dumps({**beat, "released": released, "stale_after_s": STALE_S})
        )

    def check_now(self) -> None:
        """Raise `NotAsAsked` if another process took the run. Blocking: for `Offload`."""
        taken = self._read()
        if taken is None or taken.nonce != self._nonce:
            who = f" by {taken.holder}" if taken else ""
            raise NotAsAsked(
                f"{self._paths.root} was taken{who} while this collector stood still: it stops here",
                hint="nothing was lost; the other collector goes on with this run",
            )

    async def check(self) -> None:
        """`check_now`, off the event loop."""
        await self._offload.run(self.check_now)

    async def keep(self) -> None:
        """Beat until cancelled. Raises `NotAsAsked` once the run was taken; a beat that cannot be written is left out,
        since only a holder on another machine would miss it."""
        while True:
            await self._clock.sleep_until(self._clock.monotonic() + HEARTBEAT_S)
            await self.check()
            with suppress(GymckptError):
                await self._offload.run(lambda: self._beat(released=False))

    async def release(self) -> None:
        """Let the run go, and say so for other machines; never raises for what cannot be written."""
        with suppress(GymckptError):
            await self._offload.run(self._release_if_ours)
        if self._system is not None:
            self._system.release()
            self._system = None

    def _release_if_ours(self) -> None:
        self.check_now()
        self._beat(released=True)
