"""The rows of each bundled task set, by name."""

from collections.abc import Callable, Iterator
from typing import Any

from gymckpt.errors import UsageError

TASKSETS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {}
"""By name, without the `@` of the command line."""


def task_rows(name: str) -> Iterator[dict[str, Any]]:
    """The rows of the bundled task set `name` (`workbench` or `@workbench`), the same ones every time.

    A row is typed: `{"task_id": {"taskset", "task_id"}, "task_input": {"responses_create_params", "task_data"}}`.
    Raises `UsageError` on a name that is not bundled.
    """
    make = TASKSETS.get(name.removeprefix("@"))
    if make is None:
        raise UsageError(f"there is no bundled task set {name[:80]!r}", hint=f"choose one of @{', @'.join(TASKSETS)}")
    return make()
