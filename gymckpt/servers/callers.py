"""Callers that go away: nobody waits for their answers, so nothing more is spent on them."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

from gymckpt.errors import GymckptError

T = TypeVar("T")


class CallerGone(GymckptError):
    """The caller closed its connection before its answer was there. Nobody reads this."""

    code = "caller_gone"
    http_status = 499


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives. It is cancelled, and `CallerGone` raised, once the caller has closed the connection.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise CallerGone("the caller closed the connection")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
