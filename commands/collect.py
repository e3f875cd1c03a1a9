"""`gymckpt collect`: every planned rollout, with checkpoints on the way."""

from typing import Annotated, Any

import typer

from . import flags


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(
        "collect",
        epilog="Examples: gymckpt collect @workbench --limit 20 --checkpoint-every 10s · "
        "gymckpt collect tasks.jsonl --url environment=http://127.0.0.1:8001 --run-dir runs/a --resume",
    )(flags.with_settings(collect))


def collect(
    given: dict[str, Any],
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines, nothing else.")] = False,
) -> None:
    """Runs every rollout of TASKS, checkpoints them while they run, and writes one outcome for each.

    Ctrl-C or SIGTERM: a last checkpoint, then the command that goes on is printed (exit 75). SIGUSR1: a checkpoint now.
    """
    from gymckpt.collection.opening import source_of
    from gymckpt.ports import ThreadOffload
    from gymckpt.storage.files import LocalFileSystem

    from .collecting import Job, carry_out
    from .embedded import absolute
    from .places import check_place, fresh_directory

    settings = flags.load(given).settings
    source = source_of(settings)  # before any server is started: is there such a file, or such a set?
    root = absolute(settings.run_dir or fresh_directory())
    fs = LocalFileSystem(group_readable=settings.group_readable)
    unfinished = check_place(fs, ThreadOffload(), root, settings, restore=False)
    job = Job(settings=settings, root=root, source=source, restore=False, needs_servers=unfinished, as_json=as_json)
    raise typer.Exit(carry_out(job))
