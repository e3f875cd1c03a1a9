"""The audit log: a line for every call, written before the call is made, outside any checkpoint.

It answers afterwards what was done how often, whatever crashed in between.
"""

import os
import threading
from pathlib import Path
from typing import Any

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.ports import Clock, Offload


class AuditLog:
    """Appends lines to a file that many processes may share: each is one `write` to a descriptor opened to append."""

    def __init__(self, path: Path, server: str, clock: Clock, offload: Offload) -> None:
        self._path = path
        self._server = server
        self._clock = clock
        self._offload = offload
        self._descriptor: int | None = None
        self._opening = threading.Lock()

    async def record(self, episode: EpisodeId | None, call: int, **what: Any) -> None:
        """Return once the line `{"t", "server", "rollout_id", "attempt", "call", **what}` is with the system.

        It survives the death of this process, not of the machine. Raises `OSError`: then make no call.
        """
        line = {
            "t": self._clock.time(),
            "server": self._server,
            "rollout_id": episode.rollout_id if episode else None,
            "attempt": episode.attempt if episode else None,
            "call": call,
            **what,
        }
        await self._offload.run(lambda: self._append(jsoncodec.dumps(line) + b"\n"))

    def _append(self, data: bytes) -> None:
        with self._opening:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o600)
            descriptor = self._descriptor
        written = os.write(descriptor, data)
        if written != len(data):
            raise OSError(f"{self._path}: only {written} of {len(data)} bytes of an audit line were written")

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
