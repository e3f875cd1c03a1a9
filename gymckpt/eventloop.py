"""The process of long-running commands and servers: its event loop (uvloop where there is one), and its memory."""

import asyncio
import ctypes
import gc
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

GARBAGE_AFTER = 20_000
"""New containers between two collections. With 700, Python's default, a busy loop spends a sixth of its time there."""
LARGE_BYTES = 128 << 10
"""A block of so many bytes goes back to the system when it is freed."""
ARENAS = 2
"""Heaps that threads share. With glibc's eight a core, each would keep the largest that it ever had."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`. What the program has loaded so far is not garbage, and is not looked at again."""
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER)
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(main)


def give_memory_back() -> None:
    """Have large blocks go back to the system as soon as they are freed, for a process through which replies pass.

    glibc raises its limit for that by itself with the first such block; then replies of some hundred kilobytes leave
    holes behind, and a collector grows with every rollout that it has finished. Not for servers: those that write
    checkpoints use blocks of that size again and again, and fresh pages cost them a quarter of a commit.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, ARENAS)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, LARGE_BYTES)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    if sys.platform != "win32" and sys.implementation.name == "cpython":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()
