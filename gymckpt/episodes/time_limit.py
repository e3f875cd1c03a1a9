"""The time an episode may take: it stands still while the episode is parked, and goes over into its boundary."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gymckpt.errors import GymckptError
from gymckpt.ports import Clock

T = TypeVar("T")


class TimeLimitReached(GymckptError):
    """An episode used up its time. Its own failure, not a server's."""

    code = "time_limit"
    http_status = 504


class TimeLimit:
    """A stopwatch with an end. Standing at first; `limit_s` None never ends but still measures."""

    def __init__(self, clock: Clock, limit_s: float | None, used_s: float = 0.0) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._used_s = used_s
        self._since: float | None = None
        self._running = asyncio.Event()

    @property
    def used_s(self) -> float:
        """Seconds measured so far, in this process and before it."""
        running_s = 0.0 if self._since is None else self._clock.monotonic() - self._since
        return self._used_s + running_s

    def start(self) -> None:
        """Measure from now on. Safe to repeat."""
        if self._since is None:
            self._since = self._clock.monotonic()
            self._running.set()

    def stop(self) -> None:
        """Stand still. Safe to repeat."""
        if self._since is not None:
            self._used_s, self._since = self.used_s, None
            self._running.clear()

    async def run(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work`; raises `TimeLimitReached` when the time is used up, once the cancelled work has come to its end.

        A cancellation from outside cancels the work once and waits for its end as well.
        """
        if self._limit_s is None:
            return await work()
        task = asyncio.ensure_future(work())
        watch = asyncio.ensure_future(self._used_up(self._limit_s))
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            watch.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if task.done() and not task.cancelled():
                task.exception()  # seen, so that the loop does not report it as lost
        raise TimeLimitReached(f"the time limit of {self._limit_s:g} s was reached in step {what}")

    async def _used_up(self, limit_s: float) -> None:
        while True:
            await self._running.wait()
            remaining_s = limit_s - self.used_s
            if remaining_s <= 0:
                return
            # Standing still only puts the end off, so it can never come before this.
            await self._clock.sleep_until(self._clock.monotonic() + remaining_s)
