"""What a verb says: results on stdout, all else on stderr, and with `--json` nothing on stdout but JSON."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType

from gymckpt import jsoncodec
from gymckpt.errors import GymckptError
from gymckpt.report.words import visible


def stdout() -> Console:
    """Where results go. Honours NO_COLOR and TERM=dumb; lines of a pipe are never wrapped."""
    return _console(stderr=False)


def stderr() -> Console:
    """Where everything else goes."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 200
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=not stream.isatty(), emoji=False)


def terminal_width() -> int:
    """How many columns results have."""
    return stdout().width


def is_lively() -> bool:
    """Whether a display that redraws itself is welcome: a terminal, not dumb, not a CI job's log."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb") and not os.environ.get("CI")


def show(what: RenderableType) -> None:
    """Print a table or text as the verb's result."""
    stdout().print(what, markup=False)


def show_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document as a line."""
    sys.stdout.buffer.write(jsoncodec.dumps(document) + b"\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A word to the person at the terminal."""
    print(visible(text), file=sys.stderr, flush=True)


def complain(error: GymckptError) -> None:
    """One message: what and where, then what to do."""
    message = f"error: {error.detail}"
    if error.hint:
        message += f"\n  {error.hint}"
    note(message)
