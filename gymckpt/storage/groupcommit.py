"""Many who wait, one fsync: items that come while a write is under way go out together in the next one."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from gymckpt.ports import Offload

Item = TypeVar("Item")
Result = TypeVar("Result")


class GroupCommit(Generic[Item, Result]):
    """Hands batches to `write` (blocking, one at a time, all or nothing) and its results to those who wait."""

    def __init__(self, offload: Offload, write: Callable[[list[Item]], list[Result]]) -> None:
        self._offload = offload
        self._write = write
        self._waiting: list[tuple[Item, asyncio.Future[Result], Callable[[Result], None]]] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, item: Item, then: Callable[[Result], None] = lambda result: None) -> "asyncio.Future[Result]":
        """What `write` gives for `item`, once it is durable and `then` was told, in the order of `add`.

        A caller that is cancelled does not call it back: it is written, and `then` is told.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future, then))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._write_all())
        return future

    async def drain(self) -> None:
        """Wait until nothing waits to be written."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                items = [item for item, _, _ in batch]
                results = await self._offload.run(partial(self._write, items))
            except BaseException as error:
                for _, future, _ in batch:
                    _fail(future, error)
                if not isinstance(error, Exception):
                    raise
            else:
                for (_, future, then), result in zip(batch, results, strict=True):
                    _settle(future, then, result)


def _settle(future: "asyncio.Future[Result]", then: Callable[[Result], None], result: Result) -> None:
    try:
        then(result)
    except Exception as error:
        _fail(future, error)
    else:
        if not future.done():
            future.set_result(result)


def _fail(future: "asyncio.Future[Result]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen: whoever waits gets it, and asyncio need not report it if nobody does
