"""Prints JSON lines from a thread of its own: a reader that stands still must not make the collector stand still."""

import queue
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from gymckpt import jsoncodec


class LinePrinter:
    """A context manager; leaving it waits until everything is written, or nobody reads any more.

    It then raises the `OSError` that kept lines from being written, if there was one.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._write, name="stdout", daemon=True)

    def print(self, event: Mapping[str, Any]) -> None:
        """One line, soon."""
        self._lines.put(jsoncodec.dumps(event) + b"\n")

    def _write(self) -> None:
        wanted = True
        while (line := self._lines.get()) is not None:
            if not wanted:
                continue
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                wanted = False  # the run goes on; its results are in its directory
            except OSError as error:
                wanted, self._failure = False, error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.put(None)
        self._thread.join()
        if self._failure is not None and error is None:
            raise OSError(self._failure.errno, self._failure.strerror, "standard output") from self._failure
