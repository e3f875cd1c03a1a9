"""`gymckpt checkpoint`: asks a running collection for a checkpoint now."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gymckpt.errors import NotAsAsked, StoppedResumable

from .console import note, show_json

LOOK_EVERY_S = 0.2


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("checkpoint", epilog="Example: gymckpt checkpoint runs/a --name before-upgrade")(checkpoint)


def checkpoint(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run directory of a collection that runs.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="A named checkpoint is never pruned.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1, metavar="SECONDS", help="How long to wait.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Asks the collector of this run for a checkpoint now, and waits for its answer. The run goes on."""
    checkpoint_id = asyncio.run(_ask(directory, name, timeout))
    if as_json:
        show_json({"checkpoint_id": checkpoint_id, "name": name})
    else:
        print(checkpoint_id)


async def _ask(directory: Path, name: str | None, timeout_s: float) -> str:
    from gymckpt.collection.events import CheckpointNamed, RequestFailed
    from gymckpt.collection.lock import RunLock
    from gymckpt.collection.opening import read_journals
    from gymckpt.collection.reading import look
    from gymckpt.collection.requests import ask_for_checkpoint
    from gymckpt.collection.rundirectory import RunPaths, read_run
    from gymckpt.ports import SystemClock, ThreadOffload
    from gymckpt.storage.durable import exists, remove_quietly
    from gymckpt.storage.files import LocalFileSystem

    fs, offload, clock, paths = LocalFileSystem(), ThreadOffload(), SystemClock(), RunPaths(directory)
    run_id = read_run(fs, paths).run_id
    lock = RunLock(fs, offload, clock, paths)
    if await lock.is_let_go():
        raise NotAsAsked(f"no collector runs {directory}", hint=f"go on with: gymckpt restore {directory}")
    if name is not None and (bearer := (await look(fs, offload, clock, paths)).run.bearer(name)) is not None:
        raise NotAsAsked(
            f"{name} is the name of {bearer} already",
            hint=f"give another; gymckpt prune {directory} --checkpoint {bearer} removes that one, and frees its name",
        )
    request = ask_for_checkpoint(fs, paths, name)
    note(f"asked for a checkpoint ({request})")
    waiting = paths.requests / f"{request}.json"
    try:
        async with asyncio.timeout(timeout_s):
            # Another process answers, perhaps on another machine: its word is in the directory, so we look there.
            while exists(fs, waiting) is not None:
                if await lock.is_let_go() and exists(fs, waiting) is not None:
                    remove_quietly(fs, waiting)
                    raise NotAsAsked("the collector ended before it took the checkpoint")
                await clock.sleep_until(clock.monotonic() + LOOK_EVERY_S)
    except TimeoutError:
        raise NotAsAsked(
            f"no collector answered within {timeout_s:g} s",
            hint=f"the request stays: whoever next runs {directory} takes the checkpoint",
        ) from None
    journals = await read_journals(fs, offload, clock, paths, run_id)
    for event in journals.replay_events():
        match event:
            case CheckpointNamed(checkpoint_id, _, answered) if answered == request:
                return checkpoint_id
            case RequestFailed(answered, reason) if answered == request:
                raise StoppedResumable(f"no checkpoint was taken: {reason}", hint="the run goes on; ask again")
    raise NotAsAsked(f"the request {request} was removed without an answer")
