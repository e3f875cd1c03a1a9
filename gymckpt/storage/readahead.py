"""Reads on in a thread while what was read is used.

Asking for each batch by itself would cost two changes of thread and of the interpreter's lock, as long as decoding it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Generic, TypeVar

from gymckpt.ports import Offload

Batch = TypeVar("Batch")
Result = TypeVar("Result")


class ReadAhead(Generic[Batch, Result]):
    """What `read` makes of each of `batches` (a batch, and the bytes it costs), in order.

    A thread reads on until `limit_bytes` are read and not yet used, tells of what it has when that is half of them, and
    is called again when half of them are used: no thread ever waits. No more is in memory than the limit and a batch.
    """

    def __init__(self, batches: Iterator[tuple[Batch, int]], read: Callable[[Batch], Result], limit_bytes: int) -> None:
        self._batches = batches
        self._read = read
        self._limit_bytes = limit_bytes
        self._ready: deque[tuple[Result, int]] = deque()
        self._read_bytes = 0
        self._used_bytes = 0
        self._news = asyncio.Event()
        self._closed = False

    async def results(self, offload: Offload) -> AsyncGenerator[Result, None]:
        """Once. Raises what `batches` and `read` raise, after all that came before it."""
        reading = self._read_on(offload)
        try:
            while True:
                if _stopped_short(reading) and self._unused_bytes <= self._limit_bytes // 2:
                    reading = self._read_on(offload)
                if self._ready:
                    result, size_bytes = self._ready.popleft()
                    yield result
                    del result
                    self._used_bytes += size_bytes
                elif reading.done():
                    reading.result()
                    return
                else:
                    await self._wait()
        finally:
            self._closed = True
            reading.cancel()

    @property
    def _unused_bytes(self) -> int:
        return self._read_bytes - self._used_bytes

    async def _wait(self) -> None:
        self._news.clear()
        if not self._ready:
            await self._news.wait()

    def _read_on(self, offload: Offload) -> asyncio.Task[bool]:
        loop = asyncio.get_running_loop()

        def read() -> bool:
            """Whether batches may be left. In the thread: of what the event loop reads, it writes `_ready` first."""
            for batch, size_bytes in self._batches:
                self._ready.append((self._read(batch), size_bytes))
                self._read_bytes += size_bytes
                if self._closed:
                    return False
                if self._unused_bytes >= self._limit_bytes // 2:
                    loop.call_soon_threadsafe(self._news.set)
                if self._unused_bytes >= self._limit_bytes:
                    return True
            return False

        reading = asyncio.ensure_future(offload.run(read))
        reading.add_done_callback(lambda _: self._news.set())
        return reading


def _stopped_short(reading: asyncio.Task[bool]) -> bool:
    return reading.done() and reading.exception() is None and reading.result()
