"""`gymckpt report`: the numbers of a run."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from .console import show, show_json


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("report", epilog="Example: gymckpt report runs/a --tasks --json")(report)


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    tasks: Annotated[bool, typer.Option("--tasks", help="Also each task that has a sample.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Shows mean@k and pass@k with confidence intervals, whole and by agent, and what failed.

    From the journal, over every sample of the run, whoever collected it when; at any time. Attempts are not samples.
    """
    from gymckpt.collection.rundirectory import split_checkpoint
    from gymckpt.ports import ThreadOffload
    from gymckpt.report.scores import report
    from gymckpt.report.tables import report_tables
    from gymckpt.storage.files import LocalFileSystem

    fs = LocalFileSystem()
    paths, _ = split_checkpoint(fs, directory)
    document = asyncio.run(report(fs, ThreadOffload(), paths, tasks=tasks))
    if as_json:
        show_json(document.model_dump(mode="json"))
    else:
        show(report_tables(document))
