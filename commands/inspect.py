"""`gymckpt inspect`: checkpoints, episodes and boundaries; with an episode its conversation."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gymckpt.report.words import visible

from .console import show, show_json, terminal_width


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(
        "inspect",
        epilog="Examples: gymckpt inspect runs/a · gymckpt inspect runs/a 3f2a1b2c-17-0",
    )(inspect)


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory, or one checkpoint directory.")],
    episode: Annotated[
        str | None, typer.Argument(metavar="EPISODE", help="Show this episode's conversation up to its boundary.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="ID", help="This checkpoint instead of the newest valid one.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="List at most so many episodes (default 50).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Lists the checkpoints of a run and the episodes of the newest one, with their boundaries.

    Also reads the directories that NeMo Gym's own participants write. Changes nothing.
    """
    if episode is not None:
        _conversation(directory, episode, checkpoint, as_json=as_json)
        return
    from gymckpt.ports import ThreadOffload
    from gymckpt.report import inspection
    from gymckpt.report.tables import inspect_tables
    from gymckpt.storage.files import LocalFileSystem

    fs, offload = LocalFileSystem(), ThreadOffload()
    target = inspection.find_target(fs, directory, checkpoint)
    shown = limit or (inspection.JSON_EPISODES if as_json else 50)
    document = asyncio.run(inspection.inspect(fs, offload, target, limit=shown))
    if as_json:
        show_json(document.model_dump(mode="json"))
    else:
        show(inspect_tables(document, width=terminal_width()))


def _conversation(directory: Path, name: str, checkpoint: str | None, *, as_json: bool) -> None:
    from rich.console import Group
    from rich.text import Text

    from gymckpt.errors import InvalidRolloutId, UsageError
    from gymckpt.identity import EpisodeId
    from gymckpt.ports import ThreadOffload
    from gymckpt.report import inspection
    from gymckpt.report.conversation import lines_of, read_conversation
    from gymckpt.storage.files import LocalFileSystem

    try:
        episode = EpisodeId.parse(name)
    except InvalidRolloutId as error:
        raise UsageError(error.detail, hint="an episode is ROLLOUT or ROLLOUT-aN, as inspect lists them") from error
    fs, offload = LocalFileSystem(), ThreadOffload()
    target = inspection.find_target(fs, directory, checkpoint)

    async def read() -> list[dict[str, object]]:
        path = await inspection.newest_checkpoint(fs, offload, target)
        return await read_conversation(fs, offload, path, await inspection.exact_episode(fs, offload, path, episode))

    items = asyncio.run(read())
    if as_json:
        show_json({"rollout_id": episode.rollout_id, "attempt": episode.attempt, "items": items})
        return
    show(Group(*(Text.assemble((f"{line.who}: ", "bold"), visible(line.text)) for line in lines_of(items))))
