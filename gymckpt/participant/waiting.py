"""Waiting with a deadline for what goes on whether or not somebody waits for it."""

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

from gymckpt.ports import Deadline


async def first_of(deadline: Deadline, *waits: Coroutine[Any, Any, Any]) -> bool:
    """Wait until the first of `waits` returns (True) or the deadline passes (False); raises what it raised.

    The others are cancelled and have ended when this returns, also when the caller is cancelled.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=deadline.remaining_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return bool(done)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_done(deadline: Deadline, tasks: Collection[asyncio.Task[Any]]) -> bool:
    """Wait until every task is done, or the deadline passes (False). Never cancels them, never raises their errors."""
    if not tasks:
        return True
    _, pending = await asyncio.wait(tasks, timeout=deadline.remaining_s)
    return not pending


async def done_or(task: asyncio.Task[Any], ended: asyncio.Event, deadline: Deadline) -> None:
    """Wait until `task` is done, `ended` is set, or the deadline passes; the caller looks which. `task` goes on."""
    await first_of(deadline, settled(task), ended.wait())


async def settled(task: asyncio.Task[Any]) -> None:
    """Return when `task` is done, however it went."""
    await asyncio.wait([task])
