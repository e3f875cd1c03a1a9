"""Admission: the gate that a checkpoint closes, and the work that is on the inner side of it.

What waits at the gate is not in flight and blocks nothing. What has passed is in flight until it leaves, or parks.
Everything here runs on one event loop; a check and the step that follows it without an `await` cannot be torn apart.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Set
from contextlib import asynccontextmanager, contextmanager

from gymckpt.errors import AdmissionClosed, ControlError


class Signal:
    """`Something may have changed since you last looked`: what a role's `report` and `changed` stand on."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake everyone who waits, and whoever waits next without having looked."""
        self._event.set()

    def looked(self) -> None:
        """Call while taking a look (in `report`): only what comes later is news."""
        self._event.clear()

    async def wait(self) -> None:
        """Return when something changed since the last look."""
        await self._event.wait()


class Unit:
    """One piece of work inside the gate, for example a request. Counted until it leaves or while it is not parked."""

    def __init__(self, gate: "Gate", name: str) -> None:
        self._gate = gate
        self.name = name
        self.counted = False

    def count(self) -> None:
        """Block from now on. Safe to repeat."""
        if not self.counted:
            self.counted = True
            self._gate._add(self.name, 1)

    def leave(self) -> None:
        """Block no longer. Safe to repeat."""
        if self.counted:
            self.counted = False
            self._gate._add(self.name, -1)

    @asynccontextmanager
    async def parked(self) -> AsyncIterator[None]:
        """Do not block inside the `async with`; afterwards wait until the gate is open, and count again."""
        self.leave()
        yield
        await self._gate.wait_open()
        self.count()


class Gate:
    """Open or closed, with the names of what is in flight behind it.

    `changed` is notified whenever either changes; a role may notify it for reasons of its own.
    """

    def __init__(self, changed: Signal | None = None) -> None:
        self.changed = changed or Signal()
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight: Counter[str] = Counter()
        self._waiting = 0

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def close(self) -> None:
        """New work waits. Safe to repeat."""
        self._open.clear()
        self.changed.notify()

    def open(self) -> None:
        """Whatever waits goes on. Safe to repeat."""
        self._open.set()
        self.changed.notify()

    async def wait_open(self) -> None:
        """Return while the gate is open: what wakes to find the next checkpoint closing goes on waiting."""
        while not self._open.is_set():
            self._waiting += 1
            try:
                await self._open.wait()
            finally:
                self._waiting -= 1

    def check_open(self, detail: str, error: type[ControlError] = AdmissionClosed) -> None:
        """Raise `error` (a not-started refusal: the caller sends the same again) if the gate is closed."""
        if not self._open.is_set():
            raise error(detail)

    @contextmanager
    def in_flight(self, name: str) -> Iterator[Unit]:
        """Count a unit under `name` (a capture key, or `<route>` for keyless work) whatever the gate's state."""
        unit = Unit(self, name)
        unit.count()
        try:
            yield unit
        finally:
            unit.leave()

    @asynccontextmanager
    async def admit(self, name: str, check: Callable[[], None] | None = None) -> AsyncIterator[Unit]:
        """Wait until open, then count a unit. `check` (marks, sessions) runs after the wait and before the count."""
        await self.wait_open()
        if check is not None:
            check()
        with self.in_flight(name) as unit:
            yield unit

    @property
    def names(self) -> Set[str]:
        """The names that have a unit in flight."""
        return self._in_flight.keys()

    def count(self, name: str) -> int:
        """Units in flight under `name`."""
        return self._in_flight.get(name, 0)

    @property
    def total(self) -> int:
        """Units in flight."""
        return self._in_flight.total()

    @property
    def waiting(self) -> int:
        """Work that waits at the gate."""
        return self._waiting

    def _add(self, name: str, by: int) -> None:
        self._in_flight[name] += by
        if self._in_flight[name] <= 0:
            del self._in_flight[name]
        self.changed.notify()
