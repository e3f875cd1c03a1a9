"""How a running session stops when it is asked to: a last checkpoint within the grace, then clean servers."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from gymckpt.collection.session import Session
from gymckpt.collection.signals import Wishes
from gymckpt.collection.ticking import Ticker
from gymckpt.errors import GymckptError
from gymckpt.identity import EpisodeId
from gymckpt.ports import Deadline

CLEANUP_S = 5.0
"""So much of the grace, at most half of it, is kept for opening the servers and retiring what is in flight."""


async def stop(
    session: Session,
    ticker: Ticker,
    dispatching: "asyncio.Task[None]",
    ticking: "asyncio.Task[None]",
    wishes: Wishes,
) -> Deadline:
    """Stop dispatch, take the last checkpoint unless hurried, retire all that is in flight. Nothing waits longer than
    the grace, whose end it gives; work cut short here writes no outcome."""
    clock, grace_s = session.ports.clock, session.settings.grace
    grace_s = max(grace_s - wishes.reserved_s, grace_s / 2)
    end = Deadline.after(clock, grace_s)
    session.dispatcher.gate.close("stopping")
    dispatching.cancel()
    await asyncio.wait([dispatching])
    if session.deployment.participants:
        limit = Deadline(clock, end.at_s - min(CLEANUP_S, grace_s / 2))
        await _unless_hurried(ticker.last(ticking, limit), wishes, limit, session)
    held = {*session.in_flight(), *session.restored_unsent()}
    await session.dispatcher.halt()
    with suppress(GymckptError, TimeoutError):
        async with asyncio.timeout(end.remaining_s):
            await _leave_clean(session, held)
    return end


async def _unless_hurried(work: Coroutine[Any, Any, Any], wishes: Wishes, limit: Deadline, session: Session) -> None:
    working = asyncio.create_task(work)
    hurried = asyncio.create_task(wishes.hurry.wait())
    try:
        await asyncio.wait([working, hurried], timeout=limit.remaining_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hurried.cancel()
        working.cancel()
        await asyncio.wait([working, hurried])
    if not working.cancelled() and (error := working.exception()) is not None:
        if not isinstance(error, GymckptError):
            raise error
        session.emit({"event": "note", "text": f"no last checkpoint: {error.detail}"})


async def _leave_clean(session: Session, held: set[EpisodeId]) -> None:
    async with asyncio.TaskGroup() as group:
        for episode in sorted(held):
            group.create_task(session.retirer.retire(episode))
