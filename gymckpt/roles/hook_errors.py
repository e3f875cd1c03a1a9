"""What an environment author's hook raises, whatever it is, as an error that fails one checkpoint and nothing else."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

SAID_CHARACTERS = 200


class HookEscaped(Exception):
    """A hook raised what is no `Exception` (`SystemExit`, `GeneratorExit`), its cause: it must not end the server."""


async def contained(hook: Callable[[], Awaitable[T]]) -> T:
    """What `hook` gives, called here: raises an `Exception`, or the `CancelledError` of whoever cancels this."""
    try:
        return await hook()
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise HookEscaped from error


def said(error: BaseException) -> str:
    """`error` on one line: its type and the beginning of its text, even where that text cannot be had."""
    cause = error.__cause__ if isinstance(error, HookEscaped) and error.__cause__ is not None else error
    try:
        text = one_line(str(cause))
    except Exception as worse:  # an author's own class of errors
        text = f"(its text raises {type(worse).__name__})"
    return f"{type(cause).__name__}: {text}"


def one_line(text: str) -> str:
    """The beginning of `text`, its line breaks as spaces."""
    return " ".join(text[: 2 * SAID_CHARACTERS].split())[:SAID_CHARACTERS]
