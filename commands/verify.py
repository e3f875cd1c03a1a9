"""`gymckpt verify`: every byte read again."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gymckpt.errors import DamagedState, StorageUnavailable

from .console import show, show_json


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("verify", epilog="Example: gymckpt verify runs/a --json")(verify)


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory, or one checkpoint directory.")],
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="ID", help="Only this checkpoint of the run.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Structure only: sizes, manifests, indexes and journals, no record.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Reads everything again and checks every digest, count, reference and id.

    Says exactly what is damaged or lost and which checkpoint a restore would use. Exit code 4 if anything is; 75 if
    something cannot be read now, and the rest is whole.
    """
    from gymckpt.ports import ThreadOffload
    from gymckpt.report import inspection, verification
    from gymckpt.report.tables import verify_table
    from gymckpt.storage.files import LocalFileSystem

    fs = LocalFileSystem()
    target = inspection.find_target(fs, directory, checkpoint)
    document = asyncio.run(verification.verify(fs, ThreadOffload(), target, quick=quick))
    if as_json:
        show_json(document.model_dump(mode="json"))
    else:
        show(verify_table(document))
    if document.found:
        unreadable = all(problem.unreadable for problem in document.found)
        raise typer.Exit(StorageUnavailable.exit_code if unreadable else DamagedState.exit_code)
