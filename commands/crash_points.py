"""`gymckpt crash-points`: the named places where a process can be made to die, for tests of recovery."""

import importlib
import pkgutil
from typing import Annotated

import typer

import gymckpt
from gymckpt import crashpoints

from .console import show_json


def register(app: typer.Typer) -> None:
    """Add the verb to `app`; hidden, since it serves tests."""
    app.command("crash-points", hidden=True)(list_crash_points)


def list_crash_points(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Lists the crash points: GYMCKPT_CRASH_AT=NAME[:kill|error|enospc|eio|hang[:N]] arms one."""
    for module in pkgutil.walk_packages(gymckpt.__path__, "gymckpt."):
        if not module.name.startswith(("gymckpt.integrations", "gymckpt.commands")):
            importlib.import_module(module.name)
    if as_json:
        show_json({"crash_points": dict(sorted(crashpoints.CRASH_POINTS.items()))})
        return
    for name, where in sorted(crashpoints.CRASH_POINTS.items()):
        print(f"{name:40} {where}")
