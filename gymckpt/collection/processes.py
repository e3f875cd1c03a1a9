"""Servers without a control plane, as a Gym head server lists them: which process stands behind each name.

Such a server does not refuse the sessions that it lost with its process. A result is counted only after a look that
began once the result was there: if the process was replaced by then, the result may have come from an empty session.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeAlias

Mark: TypeAlias = tuple[int | None, float | None]
"""Process id and start time; (None, None) where the head server does not know them."""

UNKNOWN: Mark = (None, None)


class Processes:
    """`first` is what was listed before anything was dispatched; `read` gives what is listed now."""

    def __init__(self, first: Mapping[str, Mark], read: Callable[[], Awaitable[Mapping[str, Mark]]]) -> None:
        self._known = first
        self._seen = first
        self._read = read
        self._begun = 0
        self._look: tuple[int, asyncio.Task[None]] | None = None

    async def replaced(self, names: Collection[str]) -> tuple[str, ...]:
        """Those of `names` that are another process than the accepted one, from a list read after this call began.

        A name whose process the list does not tell is never among them. Raises what `read` raises.
        """
        if not any(self._known.get(name, UNKNOWN) != UNKNOWN for name in names):
            return ()
        wanted = self._begun + 1
        while self._look is not None and self._look[0] < wanted:
            await asyncio.wait([self._look[1]])
        if self._look is None:
            self._begun += 1
            self._look = (self._begun, asyncio.create_task(self._take()))
            self._look[1].add_done_callback(self._taken)
        await asyncio.shield(self._look[1])
        return tuple(name for name in names if self._is_other(name))

    def accept(self) -> None:
        """What was seen last is what counts from now on: everything that was in flight before is void."""
        self._known = self._seen

    def _is_other(self, name: str) -> bool:
        known = self._known.get(name, UNKNOWN)
        return known != UNKNOWN and self._seen.get(name, UNKNOWN) != known

    async def _take(self) -> None:
        self._seen = await self._read()

    def _taken(self, task: "asyncio.Task[None]") -> None:
        self._look = None
        if not task.cancelled():
            task.exception()


def nobody_tells() -> Processes:
    """Where no head server lists processes: none is ever seen to be replaced."""

    async def read() -> Mapping[str, Mark]:
        return {}

    return Processes({}, read)
