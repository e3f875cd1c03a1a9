"""A directory of its own for one process, and the removal of those whose processes were killed."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_LOCK = ".in-use"


class Scratch:
    """A temporary directory that is locked while its process lives. Blocking."""

    def __init__(self, purpose: str) -> None:
        prefix = f"gymckpt-{purpose}-"
        root = Path(tempfile.gettempdir())
        for left in root.glob(f"{prefix}*"):
            _remove_if_dead(left)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_dead(directory: Path) -> None:
    # One without a lock file is being made at this moment, or is somebody else's.
    with suppress(OSError):
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
