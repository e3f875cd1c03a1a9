"""What the user asks of a running collector by signal; the handler itself writes the first line of feedback."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_AT_ONCE = 75


class Wishes:
    """What was asked for so far. Signals raise them; so may any other code on the event loop."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        """Stop dispatch, checkpoint, leave."""
        self.hurry = asyncio.Event()
        """Skip the checkpoint, but clean up."""
        self.checkpoint = asyncio.Event()
        """Take a checkpoint now and go on; cleared by who takes it."""
        self.reserved_s = 0.0
        """So much of the grace, at most half of it, is for what ends after the collector: embedded servers may hang."""
        self.stopped = False
        """As `stop`, for threads."""

    def ask_to_stop(self) -> None:
        """As the first SIGTERM or SIGINT; called again, as the second."""
        if self.stopped:
            self.hurry.set()
        self.stopped = True
        self.stop.set()


def first_words(count: int, grace_s: float) -> bytes:
    """What the handler writes when the `count`-th signal to stop arrives."""
    match count:
        case 1:
            return f"\ngymckpt: stopping: a last checkpoint, at most {grace_s:g} s (again: skip it)\n".encode()
        case 2:
            return b"\ngymckpt: no checkpoint, only cleaning up (again: leave at once)\n"
        case _:
            return b"\ngymckpt: leaving at once\n"


@contextmanager
def handled(wishes: Wishes, grace_s: float, *, leave: Callable[[int], None] = os._exit, fd: int = 2) -> Iterator[None]:
    """Handle SIGUSR1, SIGTERM, SIGINT and (unless it is ignored, as under nohup) SIGHUP for the duration of the block.

    On the main thread, inside a running loop.
    """
    loop = asyncio.get_running_loop()
    stops = 0

    def write(text: bytes) -> None:
        try:
            os.write(fd, text)
        except OSError:
            return  # nobody reads it any more; the signal counts all the same

    def on_stop(number: int, frame: FrameType | None) -> None:
        nonlocal stops
        stops += 1
        write(first_words(stops, grace_s))
        if stops > 2:
            leave(EXIT_AT_ONCE)
        loop.call_soon_threadsafe(wishes.ask_to_stop)

    def on_checkpoint(number: int, frame: FrameType | None) -> None:
        write(b"\ngymckpt: checkpoint asked for\n")
        loop.call_soon_threadsafe(wishes.checkpoint.set)

    wanted = {signal.SIGTERM: on_stop, signal.SIGINT: on_stop, signal.SIGUSR1: on_checkpoint}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        wanted[signal.SIGHUP] = on_stop
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
