"""Storage that is slow or fails where a test says so; everything else is real."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import PurePath
from typing import TypeVar

from gymckpt.storage.files import LocalFileSystem
from tests.simulation.clock import InlineOffload

T = TypeVar("T")


class HeldOffload(InlineOffload):
    """Like a pool of threads: work goes on when its caller is cancelled. After `hold`, work begins only at `let_go`."""

    def __init__(self) -> None:
        self._free = asyncio.Event()
        self._free.set()
        self.waiting = 0

    def hold(self) -> None:
        self._free.clear()

    def let_go(self) -> None:
        self._free.set()

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.ensure_future(self._run(work)))

    async def _run(self, work: Callable[[], T]) -> T:
        self.waiting += 1
        await self._free.wait()
        self.waiting -= 1
        return await super().run(work)


class FailingFileSystem(LocalFileSystem):
    """Fails to link final names while `failing`."""

    failing = False

    def link(self, source: PurePath, target: PurePath) -> None:
        if self.failing:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))
        super().link(source, target)


class HeldManifestFileSystem(LocalFileSystem):
    """The link that gives a manifest its name waits, in its thread, until `let_go`."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.reached = threading.Event()

    def link(self, source: PurePath, target: PurePath) -> None:
        if target.name == "manifest.json":
            self.reached.set()
            assert self.let_go.wait(30)
        super().link(source, target)
