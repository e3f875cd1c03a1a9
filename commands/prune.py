"""`gymckpt prune`: removes old checkpoints of a run that nobody is carrying out."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gymckpt.errors import UsageError

from .console import show_json


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
    """Removes old checkpoints, never named ones unless they are given by id. Results and journals are not touched.

    Exit code 3 while a collector holds the run.
    """
    removed = asyncio.run(_prune(directory, keep, checkpoint or []))
    if as_json:
        show_json({"removed": removed})
    else:
        print("\n".join(f"removed {checkpoint_id}" for checkpoint_id in removed) or "nothing to remove")


async def _prune(directory: Path, keep: int, chosen: list[str]) -> list[str]:
    from gymckpt.collection.lock import RunLock
    from gymckpt.collection.rundirectory import RunPaths, read_run
    from gymckpt.ports import SystemClock, ThreadOffload
    from gymckpt.storage.checkpoints import CheckpointDirectory
    from gymckpt.storage.files import LocalFileSystem

    fs, offload, paths = LocalFileSystem(), ThreadOffload(), RunPaths(directory)
    run_id = read_run(fs, paths).run_id
    lock = RunLock(fs, offload, SystemClock(), paths)
    await lock.take()
    try:
        checkpoints = CheckpointDirectory(fs, offload, paths.checkpoints)
        if not chosen:
            return await checkpoints.prune(keep, run_id)
        known = {listed.checkpoint_id for listed in await checkpoints.listing()}
        if missing := [checkpoint_id for checkpoint_id in chosen if checkpoint_id not in known]:
            raise UsageError(
                f"{directory} has no checkpoint {missing[0][:160]!r}", hint=f"see: gymckpt inspect {directory}"
            )
        for checkpoint_id in chosen:
            await checkpoints.discard(checkpoint_id)
        return chosen
    finally:
        await lock.release()
