"""The verdict on a workbench task: is the database what the reference solution would have left behind?"""

import sqlite3
from typing import Any

from gymckpt.errors import UsageError
from gymckpt.servers.resources.workbench.database import contents, new_database
from gymckpt.servers.resources.workbench.tools import TOOL_NAMES, run_tool
from gymckpt.tasksets.workbench import solution_of

MAX_CALLS = 1000


def verdict(database: sqlite3.Connection, task: dict[str, Any]) -> dict[str, Any]:
    """`{"reward": 1.0 or 0.0, "differences": [tables]}`. Blocking: a few milliseconds of database work.

    Raises `UsageError` when the task's data (`office`, `solution`) is not a workbench's.
    """
    expected = new_database(office_of(task))
    try:
        for name, arguments in _calls(task):
            run_tool(expected, name, arguments)
        right, found = contents(expected), contents(database)
    finally:
        expected.close()
    differences = [table for table in right if right[table] != found[table]]
    return {"reward": 0.0 if differences else 1.0, "differences": differences}


def office_of(task: dict[str, Any]) -> str:
    """The seed of the task's office; raises `UsageError`."""
    office = task.get("office")
    if not isinstance(office, str) or not 0 < len(office) <= 256:
        raise UsageError("the task's data names no office", hint="is this a row of another task set?")
    return office


def _calls(task: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    try:
        calls = [(call.name, call.arguments) for calls in solution_of(task) for call in calls]
    except (KeyError, TypeError) as error:
        raise UsageError("the task's data has no solution in rounds of calls") from error
    if len(calls) > MAX_CALLS or any(name not in TOOL_NAMES or not isinstance(given, dict) for name, given in calls):
        raise UsageError("the task's solution uses tools that a workbench does not have")
    return calls
