"""The task that drives an episode or an activation: it outlives its caller, and is cancelled once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from gymckpt.errors import GymckptError, StaleAttempt

T = TypeVar("T")

log = logging.getLogger(__name__)


async def _nothing() -> None:
    return


class Driver(Generic[T]):
    """Runs `steps`, tells `ended`, answers in `reply`, then runs `clean_up`.

    `reply` gets the result or the error of `steps`, or `StaleAttempt` after `cancel`. A caller that goes away changes
    nothing: await `reply` through `asyncio.shield`.
    """

    def __init__(
        self,
        name: str,
        steps: Callable[[], Awaitable[T]],
        *,
        ended: Callable[[], None] = lambda: None,
        clean_up: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        self._name = name
        self._steps = steps
        self._ended = ended
        self._clean_up = clean_up
        self._begun = False
        self._in_steps = True
        self._cancelled = False
        self._abandoned = False
        self.reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._drive(), name=name)
        self._task.add_done_callback(self._done)

    @property
    def in_steps(self) -> bool:
        """Whether the steps have not come to an end."""
        return self._in_steps

    def cancel(self) -> None:
        """Stop the steps; clean-up still runs. Safe to repeat: a second cancellation would break the clean-up."""
        if self._in_steps and not self._cancelled:
            self._cancelled = True
            if self._begun:  # a task that is cancelled before its first step would never reach its clean-up
                self._task.cancel()

    def abandon(self) -> None:
        """Stop without clean-up: the process ends."""
        self._abandoned = True
        self._task.cancel()

    async def gone(self) -> None:
        """Return when nothing of it runs any more, clean-up included."""
        await asyncio.wait({self._task})

    def when_gone(self, then: Callable[[], None]) -> None:
        """Call `then` once nothing of it runs any more."""
        self._task.add_done_callback(lambda _: then())

    async def _drive(self) -> None:
        self._begun = True
        try:
            if self._cancelled:
                raise asyncio.CancelledError
            outcome = await self._steps()
        except GymckptError as error:
            self._end()
            self._fail(error)
        except asyncio.CancelledError:
            self._end()
            if self._abandoned:
                raise
            self._fail(StaleAttempt(f"{self._name} was retired"))
        else:
            self._end()
            self.reply.set_result(outcome)
        await self._clean_up()

    def _end(self) -> None:
        if self._in_steps:
            self._in_steps = False
            self._ended()

    def _done(self, task: "asyncio.Task[None]") -> None:
        # An abandoned task may never have entered `_drive`.
        self._end()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("%s failed by a bug", self._name, exc_info=error)
        self._fail(error or StaleAttempt(f"{self._name} was retired"))

    def _fail(self, error: BaseException) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # seen: the caller may be gone
