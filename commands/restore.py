"""`gymckpt restore`: goes on with a run after a crash or a stop."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gymckpt.collection.settings import CollectSettings, scope_of

from . import flags

LEFT_OUT = frozenset(
    {name for name in CollectSettings.model_fields if scope_of(name) == "identity"}
    | {"run_dir", "resume", "overwrite", "accept_change"}
)
"""What a run means is in its directory; flags of a restore only say how it is carried out."""


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("restore", epilog="Examples: gymckpt restore runs/a · gymckpt restore runs/a --concurrency 16 --json")(
        flags.with_settings(restore, leave_out=LEFT_OUT)
    )


def restore(
    given: dict[str, Any],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run directory, or a checkpoint inside it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines, nothing else.")] = False,
) -> None:
    """Continues every unfinished episode of a run from its boundary in the newest whole checkpoint.

    Settings are those that the run was begun with, unless a flag says otherwise. A finished run: nothing to do, exit 0.
    """
    from gymckpt.collection.rundirectory import read_run, split_checkpoint
    from gymckpt.ports import ThreadOffload
    from gymckpt.storage.files import LocalFileSystem

    from .collecting import Job, carry_out
    from .embedded import absolute
    from .places import check_place

    fs = LocalFileSystem()
    paths, _ = split_checkpoint(fs, absolute(directory))
    record = read_run(fs, paths)
    settings = flags.load(given, record.settings).settings
    root = Path(paths.root)
    unfinished = check_place(fs, ThreadOffload(), root, settings, restore=True)
    job = Job(settings=settings, root=root, source=None, restore=True, needs_servers=unfinished, as_json=as_json)
    raise typer.Exit(carry_out(job))
