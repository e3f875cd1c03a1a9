"""The rows of each bundled task set, by name."""

from collections.abc import Callable, Iterator
from typing import Any

from gymckpt.errors import UsageError
from gymckpt.tasksets.answers import answers_rows
from gymckpt.tasksets.judged import judged_rows
from gymckpt.tasksets.mathematics import math_rows
from gymckpt.tasksets.pairwise import pairwise_rows
from gymckpt.tasksets.shell import shell_rows
from gymckpt.tasksets.workbench import workbench_rows


def mixed_rows() -> Iterator[dict[str, Any]]:
    """Rows of all sets in turn, each named by its own task set: 40 of `workbench`, 20 of each other."""
    workbench, answers, judged, shell = workbench_rows(), answers_rows(), judged_rows(), shell_rows()
    for _ in range(20):
        for rows in (workbench, answers, workbench, judged, shell):
            yield next(rows)


TASKSETS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "workbench": workbench_rows,
    "answers": answers_rows,
    "judged": judged_rows,
    "shell": shell_rows,
    "math": math_rows,
    "pairwise": pairwise_rows,
    "mixed": mixed_rows,
}
"""By name, without the `@` of the command line."""


def task_rows(name: str) -> Iterator[dict[str, Any]]:
    """The rows of the bundled task set `name` (`workbench` or `@workbench`), the same ones every time.

    A row is typed: `{"task_id": {"taskset", "task_id"}, "task_input": {"responses_create_params", "task_data"}}`.
    Raises `UsageError` on a name that is not bundled.
    """
    make = TASKSETS.get(name.removeprefix("@"))
    if make is None:
        known = ", ".join(f"@{known}" for known in TASKSETS)
        raise UsageError(f"there is no bundled task set {name[:80]!r}", hint=f"choose one of {known}")
    return make()
