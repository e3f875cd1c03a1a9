"""Time limits on an author's hooks that hold whatever the hook does.

A hook whose time is over, or whose caller is cancelled, is cancelled once. One that has not ended soon after is left to
itself: nobody waits for it any more, and what it gives is thrown away. Only a hook that blocks the event loop itself is
beyond this.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from gymckpt.roles.hook_errors import contained, said

log = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_S = 1.0
"""How long a cancelled hook may clean up before it is left to itself."""


class HookOverdue(Exception):
    """A hook's time is over."""


@dataclass(frozen=True, eq=False, slots=True)
class _Hook:
    what: str
    session_id: str | None
    changes: frozenset[str]
    undo: Callable[[], Awaitable[None]] | None


class OverdueHooks:
    """The hooks of one server that were left to themselves and have not ended; each is named in the log until then."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._left: dict[_Hook, asyncio.Task[None]] = {}
        self._running: dict[_Hook, None] = {}

    def __len__(self) -> int:
        return len(self._left)

    def changing(self) -> frozenset[str]:
        """Sessions that a hook left to itself may still change."""
        return frozenset().union(*(hook.changes for hook in self._left))

    @property
    def running(self) -> tuple[str, str | None] | None:
        """What is being waited for within its limit, and the session if it is one: the hook that began last."""
        hook = next(reversed(self._running), None)
        return (hook.what, hook.session_id) if hook is not None else None

    async def limited(
        self,
        work: Callable[[], Awaitable[T]],
        what: str,
        limit_s: float,
        *,
        grace_s: float = GRACE_S,
        session_id: str | None = None,
        changes: Collection[str] = (),
        undo: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """What `work` gives; raises what it raises as `contained` has it, and `HookOverdue` after `limit_s`.

        This returns at most `grace_s` later. `session_id`: the one session that it is for. `changes`: sessions that
        `work` writes to; where it was left to itself, `undo` is done once it has ended.
        """
        task = asyncio.ensure_future(contained(work))
        hook = _Hook(what, session_id, frozenset(changes), undo)
        self._running[hook] = None
        try:
            await asyncio.wait([task], timeout=limit_s)
            if task.cancelled():
                raise RuntimeError("it was cancelled by its own code")
            if task.done():
                return task.result()
            raise HookOverdue(what)
        finally:
            del self._running[hook]
            if not task.done():
                await self._cancel(task, grace_s, hook)

    async def _cancel(self, task: asyncio.Future[T], grace_s: float, hook: _Hook) -> None:
        task.cancel()
        try:
            await asyncio.wait([task], timeout=grace_s)
        finally:
            if not task.done():
                self._left[hook] = asyncio.create_task(self._watch(task, hook))
            elif not task.cancelled():
                task.exception()

    async def _watch(self, task: asyncio.Future[T], hook: _Hook) -> None:
        begun_s = asyncio.get_running_loop().time()
        log.warning("%s: %s has not ended although it was cancelled; it is left to itself", self._instance, hook.what)
        try:
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()
            if hook.undo is not None:
                await contained(hook.undo)
        except Exception as error:  # an author's code may raise anything
            log.warning("%s: undoing %s: %s", self._instance, hook.what, said(error))
        finally:
            del self._left[hook]
        late_s = asyncio.get_running_loop().time() - begun_s
        log.warning("%s: %s has ended, %.1f s late; what it gave is thrown away", self._instance, hook.what, late_s)
