"""What operators ask about: counters for `GET /status`, and a line of JSON each on logger `gymckpt.participant`.

Lines carry names, numbers and error texts; never a token, a record or a request body.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gymckpt import jsoncodec
from gymckpt.errors import ControlError
from gymckpt.identity import Kind

logger = logging.getLogger("gymckpt.participant")


class Events:
    """Counts and logs for one participant."""

    def __init__(self, kind: Kind, instance: str) -> None:
        self._who = {"kind": kind, "instance": instance}
        self.counters: Counter[str] = Counter()

    def emit(self, event: str, *, level: int = logging.INFO, **fields: Any) -> None:
        """Count `event` and log it as one line of JSON; the same mapping is on the record as `event`."""
        self.counters[event] += 1
        if logger.isEnabledFor(level):
            line = {"event": event, **self._who, **fields}
            logger.log(level, "%s", jsoncodec.dumps(line).decode(), extra={"event": line})

    def refused(self, operation: str, error: ControlError) -> None:
        """Count and log a refusal, as `refused.<code>`."""
        self.emit(
            f"refused.{error.code}", level=logging.WARNING, operation=operation, code=error.code, detail=error.detail
        )

    @contextmanager
    def refusals(self, operation: str) -> Iterator[None]:
        """Count and log whatever refusal leaves the `with`."""
        try:
            yield
        except ControlError as error:
            self.refused(operation, error)
            raise
