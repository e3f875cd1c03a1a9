"""Whether new requests may leave: open while nobody has a reason against it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Closed for as long as any reason stands; each is named, so that a person can be told."""

    def __init__(self) -> None:
        self._reasons: dict[str, int] = {}
        self._open = asyncio.Event()
        self._open.set()

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self._reasons)

    @property
    def is_open(self) -> bool:
        return not self._reasons

    def close(self, reason: str) -> None:
        """Add a reason; it may be added more than once, and goes when it was taken away as often."""
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        self._open.clear()

    def open(self, reason: str) -> None:
        """Take one reason away."""
        left = self._reasons[reason] - 1
        if left:
            self._reasons[reason] = left
            return
        del self._reasons[reason]
        if not self._reasons:
            self._open.set()

    @contextmanager
    def closed(self, reason: str) -> Iterator[None]:
        """Closed for the duration of the block."""
        self.close(reason)
        try:
            yield
        finally:
            self.open(reason)

    async def wait_open(self) -> None:
        """Return at a moment when no reason stands."""
        while self._reasons:
            await self._open.wait()
