"""`gymckpt prune`: removes old checkpoints of a run that nobody is carrying out."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from .console import note, show_json


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("prune", epilog="Examples: gymckpt prune runs/a --keep 1 · gymckpt prune runs/a --checkpoint ID")(prune)


def prune(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    keep: Annotated[int, typer.Option("--keep", min=1, metavar="N", help="How many unnamed checkpoints stay.")] = 1,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option("--checkpoint", metavar="ID", help="Remove exactly these instead, named ones included."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Removes old checkpoints, never named ones unless they are given by id. Results are not touched.

    One that is gone already is missed no more by verify and restore. Works on a full disk. Exit code 3 while a
    collector holds the run.
    """
    from gymckpt.collection.pruning import prune as remove
    from gymckpt.ports import SystemClock, ThreadOffload
    from gymckpt.storage.files import LocalFileSystem

    fs, offload = LocalFileSystem(), ThreadOffload()
    pruned = asyncio.run(remove(fs, offload, SystemClock(), directory, keep=keep, chosen=checkpoint or []))
    if as_json:
        show_json({"removed": pruned.removed})
    else:
        told = [f"removed {name}" for name in pruned.removed] + [f"{name} was gone already" for name in pruned.gone]
        print("\n".join(told) or "nothing to remove")
    if pruned.unrecorded is not None:
        note(f"the journal could not be told, so verify will miss what was removed: {pruned.unrecorded}")
