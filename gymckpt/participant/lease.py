"""The lease: how long a participant stays closed without hearing from its controller."""

import asyncio
from collections.abc import Callable

from gymckpt.ports import Clock


class Lease:
    """Calls `on_expiry` once the time is over, unless it was extended or dropped before. Monotonic throughout."""

    def __init__(self, clock: Clock, on_expiry: Callable[[], None]) -> None:
        self._clock = clock
        self._on_expiry = on_expiry
        self._watch: asyncio.Task[None] | None = None
        self.expires_at_s: float | None = None

    def extend(self, until_s: float) -> float:
        """Hold at least until `until_s` on the clock's `monotonic`; it never comes sooner. Gives it back."""
        self.expires_at_s = max(until_s, self.expires_at_s if self.expires_at_s is not None else until_s)
        if self._watch is None:
            self._watch = asyncio.create_task(self._wait())
        return self.expires_at_s

    def drop(self) -> None:
        """No lease, no expiry."""
        self.expires_at_s = None
        if self._watch is not None and self._watch is not asyncio.current_task():
            self._watch.cancel()
        self._watch = None

    async def _wait(self) -> None:
        while (until_s := self.expires_at_s) is not None and self._clock.monotonic() < until_s:
            await self._clock.sleep_until(until_s)
        if self.expires_at_s is not None:
            self._on_expiry()
