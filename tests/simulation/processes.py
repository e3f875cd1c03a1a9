"""Processes of a simulation: all on one event loop with virtual time, and each can be killed or stopped at any await.

A task belongs to the process that created it. Of a dead process no line runs any more, not even a `finally`: its tasks
are frozen where they stand, as SIGKILL leaves them, until `reap` clears them away after everything was checked. A
stopped process (SIGSTOP) is frozen until it is let go. `hang` freezes whoever calls it while the world goes on.
"""

import asyncio
import contextvars
import heapq
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from tests.simulation.clock import START_UNIX_S, VirtualLoop

T = TypeVar("T")

REAP_ROUNDS = 50


class ProcessKilled(BaseException):
    """Ends the step in which a process dies. Not an `Exception`, so that no code under test goes on after it."""


class Process:
    """One simulated process; `skew_s` is what its wall clock differs by."""

    def __init__(self, name: str, skew_s: float = 0.0) -> None:
        self.name = name
        self.skew_s = skew_s
        self.dead = False
        self.stopped = False
        self.hanging = False
        """Its event loop is in a call that does not return."""
        self.over = False
        """It came to its own end."""
        self.reaping = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self.on_death: set[Callable[[], None]] = set()
        self._parked: list[asyncio.Future[None]] = []

    def run(self, main: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run `main` as a task of this process."""
        return asyncio.get_running_loop().create_task(main, context=self.context())

    def context(self) -> contextvars.Context:
        """A context whose tasks belong to this process."""
        context = contextvars.Context()
        context.run(_current.set, self)
        return context

    @property
    def frozen(self) -> bool:
        return (self.dead and not self.reaping) or self.stopped or self.hanging

    def kill(self) -> None:
        """SIGKILL."""
        if not self.dead:
            self.dead = True
            for callback in list(self.on_death):
                callback()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def let_go(self) -> None:
        """SIGCONT."""
        self.stopped = False
        self.thaw()

    def thaw(self) -> None:
        """Let its tasks go on, if nothing holds them any more."""
        if not self.dead and not self.frozen:
            self._unpark()

    def check(self) -> None:
        """Called at every edge: a dead process reaches nothing."""
        if self.dead:
            raise ProcessKilled

    def park(self) -> "asyncio.Future[None]":
        """What a frozen task waits for."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future._asyncio_future_blocking = True
        self._parked.append(future)
        return future

    def _unpark(self) -> None:
        parked, self._parked = self._parked, []
        for future in parked:
            if not future.done():
                future.set_result(None)

    async def reap(self) -> None:
        """Clear away what is frozen; nothing of it can reach the world any more."""
        self.kill()
        self.reaping, self.stopped, self.hanging = True, False, False
        for _ in range(REAP_ROUNDS):
            self._unpark()
            left = [task for task in self.tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=1.0)
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.exception()
        self.tasks.clear()


_current: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
_in_thread: contextvars.ContextVar[bool] = contextvars.ContextVar("in_thread", default=False)


def current_process() -> Process | None:
    """Whose code is running; None for the world itself."""
    return _current.get()


class _Mortal(Coroutine[Any, Any, Any]):
    """A coroutine that stands still while its process is frozen."""

    def __init__(self, process: Process, inner: Coroutine[Any, Any, Any]) -> None:
        self._process = process
        self._inner = inner
        self._pending: BaseException | None = None

    def send(self, value: Any) -> Any:
        if self._process.frozen:
            return self._process.park()
        pending, self._pending = self._pending, None
        if pending is not None:
            return self._step(lambda: self._inner.throw(pending))
        return self._step(lambda: self._inner.send(value))

    def throw(self, *thrown: Any) -> Any:
        error = thrown[0] if isinstance(thrown[0], BaseException) else thrown[1] or thrown[0]()
        if self._process.frozen:
            self._pending = error
            return self._process.park()
        return self._step(lambda: self._inner.throw(error))

    def _step(self, step: Callable[[], Any]) -> Any:
        try:
            yielded = step()
        except BaseException:
            if self._process.dead and not self._process.reaping:
                return self._process.park()
            raise
        if self._process.dead and not self._process.reaping:
            return self._process.park()
        return yielded

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


def _make_task(
    loop: asyncio.AbstractEventLoop, work: Any, context: contextvars.Context | None = None
) -> "asyncio.Task[Any]":
    process = _current.get() if context is None else context.get(_current)
    if process is None:
        return asyncio.Task(work, loop=loop, context=context)
    task: asyncio.Task[Any] = asyncio.Task(_Mortal(process, work), loop=loop, context=context)
    process.tasks.add(task)
    task.add_done_callback(process.tasks.discard)
    return task


class WorldLoop(VirtualLoop):
    """Virtual time for many processes; `hang` may run it from inside one of its own steps."""

    def __init__(self) -> None:
        super().__init__()
        self._hangs = 0
        self.set_task_factory(_make_task)
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def hang(self, seconds: float) -> None:
        """The caller stands still so long: one thread of its process where it is in one, else the whole process."""
        process, alone = _current.get(), _in_thread.get()
        assert process is not None
        until = self.time() + seconds
        self.call_at(until, lambda: None)
        task = asyncio.current_task(self)
        if task is not None:
            asyncio.tasks._leave_task(self, task)
        if not alone:
            process.hanging = True
        self._hangs += 1
        try:
            # The world may come to its end meanwhile: time goes on all the same until this call returns.
            while self.time() < until and not process.dead:
                self._run_once()
        finally:
            self._hangs -= 1
            if task is not None:
                asyncio.tasks._enter_task(self, task)
            if not alone:
                process.hanging = False
                process.thaw()
        process.check()

    def _run_once(self) -> None:
        # As the base class does, but a step may have run the loop itself and left nothing to run.
        inner: Any = self
        scheduled, ready = inner._scheduled, inner._ready
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready and (self._hangs or not inner._stopping):
            if not scheduled:
                raise RuntimeError("deadlock: every task waits for something that nothing will bring")
            self._instant.now_s = max(self._instant.now_s, scheduled[0]._when)
        now_s = self._instant.now_s + inner._clock_resolution
        while scheduled and scheduled[0]._when < now_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            if not ready:
                break
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()


class ProcessClock:
    """`ports.Clock` of one process: its monotonic clock is the world's, its wall clock is its own."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def time(self) -> float:
        return START_UNIX_S + self.monotonic() + self._process.skew_s

    async def sleep_until(self, monotonic_s: float) -> None:
        await asyncio.sleep(max(0.0, monotonic_s - self.monotonic()))


class ProcessOffload:
    """`ports.Offload` with threads that are tasks: cancelling the caller does not stop what has begun."""

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.get_running_loop().create_task(self._do(work)))

    async def _do(self, work: Callable[[], T]) -> T:
        _in_thread.set(True)
        await asyncio.sleep(0)
        return work()
