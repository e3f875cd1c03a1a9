"""Virtual time: an asyncio event loop whose clock jumps to the next timer as soon as nothing else is left to do.

Hours of leases and deadlines pass in milliseconds, and the same program takes the same steps every time. Code under
test must not use threads or sockets on this loop; offloaded work runs inline (`InlineOffload`).
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

START_UNIX_S = 1_800_000_000.0


class _InstantSelector(selectors.SelectSelector):
    """Never waits: what the loop would have slept is added to the virtual clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: every task waits for something that nothing will bring")
            self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time."""

    def __init__(self) -> None:
        self._instant = _InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now_s


class VirtualClock:
    """`ports.Clock` on the running `VirtualLoop`; `jump_s` moves its wall clock alone, as an administrator would."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def time(self) -> float:
        return START_UNIX_S + self.monotonic() + self.skew_s

    async def sleep_until(self, monotonic_s: float) -> None:
        await asyncio.sleep(max(0.0, monotonic_s - self.monotonic()))


class InlineOffload:
    """`ports.Offload` that does the work at once, after letting every other ready task take a step."""

    async def run(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(0)
        return work()


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a fresh loop with virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
