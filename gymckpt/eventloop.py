"""The event loop of long-running commands and servers: uvloop where there is one, asyncio's own elsewhere."""

import asyncio
import gc
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

GARBAGE_AFTER = 20_000
"""New containers between two collections. With 700, Python's default, a busy loop spends a sixth of its time there."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`. What the program has loaded so far is not garbage, and is not looked at again."""
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER)
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(main)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    if sys.platform != "win32" and sys.implementation.name == "cpython":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()
