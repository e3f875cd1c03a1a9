"""Named places where a process can be made to die, fail or hang, so that recovery from each can be tested.

`GYMCKPT_CRASH_AT=<name>[:<action>[:<n>]]` arms one: action `kill` (SIGKILL to this process, the default), `error`,
`enospc`, `eio`, or `hang` (an hour); `n` is the passage at which it fires, 1 by default. `gymckpt crash-points` lists
the names. `GYMCKPT_CRASH_IN=<instance>[,<instance>]` (or `collector`) arms only those of a command's processes; a
server that is started again is never armed. Unarmed, a crash point costs two look-ups of a global name.
"""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from gymckpt.errors import GymckptError, UsageError

Action = Literal["kill", "error", "enospc", "eio", "hang"]
ENVIRONMENT_VARIABLE = "GYMCKPT_CRASH_AT"
ENVIRONMENT_VARIABLE_IN = "GYMCKPT_CRASH_IN"
COLLECTOR = "collector"
HANG_S = 3600.0

CRASH_POINTS: dict[str, str] = {}
"""Every declared point and where it stands; filled as modules are imported."""


class CrashPointError(GymckptError):
    """What an armed crash point raises for action `error`."""

    code = "crash_point"


@dataclass
class _Armed:
    name: str
    action: Action
    passages_left: int


_lock = threading.Lock()


def declare(name: str, where: str) -> str:
    """Register a crash point and give its name back; modules declare theirs as constants."""
    CRASH_POINTS[name] = where
    return name


def parse(text: str) -> tuple[str, Action, int]:
    """Read `<name>[:<action>[:<n>]]`; raises `UsageError`."""
    name, _, rest = text.partition(":")
    action, _, passage = rest.partition(":")
    if (action or "kill") not in get_args(Action) or not (passage or "1").isdecimal():
        raise UsageError(f"{ENVIRONMENT_VARIABLE}={text!r}: expected <name>[:kill|error|enospc|eio|hang[:<n>]]")
    return name, cast(Action, action or "kill"), int(passage or "1")


def arm(text: str | None) -> None:
    """Arm one point (replacing another), or none."""
    global _armed
    _armed = _Armed(*parse(text)) if text else None


_armed: _Armed | None = None
arm(os.environ.get(ENVIRONMENT_VARIABLE))


def watch(watcher: Callable[[str], None] | None) -> None:
    """Call `watcher` with the name of every point that is passed, before anything armed happens there. A simulation
    raises from it what is to happen to the simulated process that is running; None ends it."""
    global _watcher
    _watcher = watcher


_watcher: Callable[[str], None] | None = None


def crash_point(name: str) -> None:
    """Die, fail or hang here if this point is armed and its passage has come. Blocking: call it where that is fine."""
    if _watcher is not None:
        _watcher(name)
    armed = _armed
    if armed is None or armed.name != name:
        return
    with _lock:
        armed.passages_left -= 1
        if armed.passages_left != 0:
            return
    match armed.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "error":
            raise CrashPointError(f"crash point {name}")
        case "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        case "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        case "hang":
            time.sleep(HANG_S)
