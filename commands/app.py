"""`gymckpt`: the application, and the one place where an error becomes a message and an exit code."""

import errno
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
import typer.main
from typer.exceptions import Abort, TyperException

import gymckpt
from gymckpt import crashpoints
from gymckpt.errors import GymckptError, NoSpace, StoppedResumable, UsageError

from . import (
    checkpoint,
    collect,
    config,
    crash_points,
    export,
    inspect,
    prune,
    report,
    resolve,
    restore,
    retry,
    schema,
    serve,
    status,
    verify,
)
from .console import complain, note

INTERNAL_ERROR = 70
INTERRUPTED = 130
PATH_ERRORS = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
    }
)
"""What the system says of a path that was given wrong."""
DEBUG_FLAG = "--debug"
DEBUG_VARIABLE = "GYMCKPT_DEBUG"

app = typer.Typer(
    name="gymckpt",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Begin with: gymckpt collect @workbench --limit 20 --checkpoint-every 10s",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(gymckpt.__version__)
        raise typer.Exit


@app.callback()
def gymckpt_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG_FLAG, help="Show a traceback with every error; may stand anywhere.")
    ] = False,
) -> None:
    """Collects agentic rollouts, checkpoints them while they run, and continues each after a crash."""


for verb in (
    collect,
    restore,
    inspect,
    serve,
    status,
    verify,
    checkpoint,
    report,
    export,
    retry,
    resolve,
    prune,
    config,
    schema,
):
    verb.register(app)
crash_points.register(app)


def run(arguments: list[str]) -> int:
    """Run one command line and give its exit code; errors become one message on stderr."""
    debug = DEBUG_FLAG in arguments or bool(os.environ.get(DEBUG_VARIABLE))
    arguments = [argument for argument in arguments if argument != DEBUG_FLAG]
    try:
        result: Any = typer.main.get_command(app).main(arguments, prog_name="gymckpt", standalone_mode=False)
    except (BrokenPipeError, SystemExit):
        # Typer turns the first into the second: whoever read our output has seen enough.
        return _seen_enough()
    except (Abort, KeyboardInterrupt):
        note("interrupted")
        return INTERRUPTED
    except Exception as error:  # the boundary of the program: nothing goes further up
        status = _explain(error)
        if debug and not isinstance(error, TyperException):
            traceback.print_exc()
        return status
    return result if isinstance(result, int) else 0


def _explain(error: Exception) -> int:
    """Say what went wrong, in one message, and give the exit code."""
    match error:
        case TyperException():
            # Shown the same way as our own errors, whatever found them.
            text = " ".join(error.format_message().split())
            if text:
                complain(UsageError(text, hint="see gymckpt --help, or gymckpt VERB --help"))
            return UsageError.exit_code
        case GymckptError():
            ours = error
        case OSError():
            ours = _told_by_the_system(error)
        case _:
            note(f"internal error: {type(error).__name__}: {error}")
            note("  this is a bug in gymckpt; run the same command with --debug for the traceback to report")
            return INTERNAL_ERROR
    complain(ours)
    return ours.exit_code


def _told_by_the_system(error: OSError) -> GymckptError:
    """An error of the system that nobody below knew better: a path that cannot be used, or a disk that is full."""
    where = f"{error.filename}: " if error.filename is not None else ""
    what = f"{where}{error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(what, hint="make room, then go on with the same directory")
    if error.errno in PATH_ERRORS:
        return UsageError(what)
    return StoppedResumable(what, hint="when the cause is mended, go on with the same directory")


def _seen_enough() -> int:
    # Python must not complain about the closed pipe once more while it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _open_standard_streams() -> None:
    """Whoever starts us with one of them closed would have our files and sockets take its place."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - for as long as the process lives


def _leave_early(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"gymckpt: stopped before anything was begun\n")
    os._exit(StoppedResumable.exit_code)


def _stop_while_starting(arguments: list[str]) -> None:
    """Until the collector handles signals itself, leaving at once loses nothing; its exit code has to say so."""
    if arguments[:1] in (["collect"], ["restore"]):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave_early)


def main() -> NoReturn:
    """The `gymckpt` command."""
    _open_standard_streams()
    _stop_while_starting(sys.argv[1:])
    named = os.environ.get(crashpoints.ENVIRONMENT_VARIABLE_IN)
    if named is not None and crashpoints.COLLECTOR not in named.split(","):
        crashpoints.arm(None)
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        status = _seen_enough()
    sys.exit(status)
