"""The lock: one holder, dead ones noticed, robbed ones stopped."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePath

import pytest

from gymckpt.collection.lock import HEARTBEAT_S, STALE_S, Holder, RunLock, process_lives, process_start, this_process
from gymckpt.collection.rundirectory import RunPaths
from gymckpt.errors import DamagedState, NotAsAsked
from gymckpt.ports import Lock, ThreadOffload
from gymckpt.storage.files import LocalFileSystem


class Watch:
    """A clock whose sleeps pass at once, after `each` was awaited."""

    def __init__(self, each: Callable[[], Awaitable[None]] | None = None) -> None:
        self.now = 1000.0
        self.each = each

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    async def sleep_until(self, monotonic_s: float) -> None:
        self.now = max(self.now, monotonic_s)
        if self.each is not None:
            await self.each()
        await asyncio.sleep(0)


class Metronome(Watch):
    """A clock that a holder keeps its heartbeat by: one beat for each `beat`."""

    def __init__(self) -> None:
        super().__init__()
        self._resting = asyncio.Event()
        self._tick = asyncio.Event()

    async def sleep_until(self, monotonic_s: float) -> None:
        self.now = max(self.now, monotonic_s)
        self._resting.set()
        await self._tick.wait()
        self._tick.clear()

    def tick(self) -> None:
        """Let the next beat begin."""
        self._resting.clear()
        self._tick.set()

    async def rest(self) -> None:
        """Return once no beat is under way."""
        await self._resting.wait()

    async def beat(self) -> None:
        await self.rest()
        self.tick()
        await self.rest()


class Machine(LocalFileSystem):
    """A machine whose locks are lost on the others: as when its process is killed, or its file system does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Lock] = []
        self.slow: threading.Event | None = None
        """While set to an event, a heartbeat waits for it in the middle of its write."""
        self.writing = threading.Event()

    def lock(self, path: PurePath) -> Lock:
        held = super().lock(path)
        self._held.append(held)
        return held

    def replace(self, source: PurePath, target: PurePath) -> None:
        if target.name == "HEARTBEAT" and self.slow is not None:
            self.writing.set()
            self.slow.wait()
        super().replace(source, target)

    def lose_locks(self) -> None:
        for held in self._held:
            held.release()


def lock(
    directory: Path,
    holder: Holder,
    *,
    lives: bool = True,
    clock: Watch | None = None,
    fs: LocalFileSystem | None = None,
) -> RunLock:
    return RunLock(
        fs or LocalFileSystem(),
        ThreadOffload(),
        clock or Watch(),
        RunPaths(directory),
        holder=holder,
        lives=lambda other: lives,
    )


HERE, THERE = Holder("here", 1, "5"), Holder("there", 2, "6")


def test_a_live_holder_is_named_and_the_epoch_rises_with_every_new_one(tmp_path: Path) -> None:
    async def play() -> None:
        first = lock(tmp_path, HERE)
        assert await first.take() == 1
        with pytest.raises(NotAsAsked, match="held by here, process 1"):
            await lock(tmp_path, Holder("here", 3)).take()
        await first.release()
        assert await lock(tmp_path, Holder("here", 3)).take() == 2

    asyncio.run(play())


def test_a_dead_holder_on_this_host_is_noticed_at_once(tmp_path: Path) -> None:
    async def play() -> None:
        machine = Machine()
        await lock(tmp_path, HERE, fs=machine).take()
        machine.lose_locks()
        clock = Watch()
        assert await lock(tmp_path, Holder("here", 3), lives=False, clock=clock).take() == 2
        assert clock.now == 1000.0

    asyncio.run(play())


def test_a_holder_on_another_host_is_dead_only_after_its_heartbeat_stood_still(tmp_path: Path) -> None:
    async def play() -> None:
        machine, metronome = Machine(), Metronome()
        far = lock(tmp_path, THERE, fs=machine, clock=metronome)
        await far.take()
        machine.lose_locks()
        keeping = asyncio.create_task(far.keep())
        with pytest.raises(NotAsAsked, match="there, process 2"):
            await lock(tmp_path, HERE, clock=Watch(metronome.beat)).take()
        keeping.cancel()
        silent = Watch()
        assert await lock(tmp_path, HERE, clock=silent).take() == 2
        assert STALE_S <= silent.now - 1000.0 <= STALE_S + HEARTBEAT_S

    asyncio.run(play())


def test_a_holder_on_another_host_that_let_go_is_not_waited_for(tmp_path: Path) -> None:
    async def play() -> None:
        far = lock(tmp_path, THERE)
        await far.take()
        await far.release()
        clock = Watch()
        assert await lock(tmp_path, HERE, clock=clock).take() == 2
        assert clock.now == 1000.0

    asyncio.run(play())


def test_a_robbed_holder_learns_of_it_and_its_late_heartbeat_hides_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        machine, metronome = Machine(), Metronome()
        robbed = lock(tmp_path, HERE, fs=machine, clock=metronome)
        await robbed.take()
        keeping = asyncio.create_task(robbed.keep())
        await metronome.rest()
        machine.slow = threading.Event()
        metronome.tick()
        await asyncio.to_thread(machine.writing.wait)
        thief = lock(tmp_path, Holder("here", 3))
        assert await thief.take(steal=True) == 2
        machine.slow.set()
        await metronome.rest()
        metronome.tick()
        with pytest.raises(NotAsAsked, match="taken by here, process 3"):
            await keeping
        with pytest.raises(NotAsAsked, match="taken by here, process 3"):
            await robbed.check()
        await thief.check()
        await robbed.release()
        await thief.check()
        with pytest.raises(NotAsAsked, match="held by here, process 3"):
            await lock(tmp_path, Holder("here", 4)).take()

    asyncio.run(play())


def test_a_lock_file_that_cannot_be_read_is_damage_and_not_a_free_run(tmp_path: Path) -> None:
    (tmp_path / "LOCK").write_text(json.dumps({"host": "here"}))
    with pytest.raises(DamagedState, match="LOCK"):
        asyncio.run(lock(tmp_path, HERE).take())


def test_a_process_is_told_from_a_later_one_of_the_same_number() -> None:
    mine = this_process()
    assert process_lives(mine)
    assert mine.start == process_start(os.getpid())
    assert not process_lives(Holder(mine.host, mine.pid, "1"))
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not process_lives(Holder(mine.host, child.pid, None))
