"""`gymckpt resolve`: settles a rollout by hand."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gymckpt.errors import UsageError

from .console import show_json


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("resolve", epilog="Example: gymckpt resolve runs/a 3f2a1b2c-17-0 --omit")(resolve)


def resolve(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory that no collector holds.")],
    rollout: Annotated[list[str], typer.Argument(metavar="ROLLOUT...", help="Ids of rollouts of this run.")],
    omit: Annotated[bool, typer.Option("--omit", help="Leave them out: counted as omitted, never sent again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Settles rollouts that hang, fail again and again, or are not wanted, so that the run can end.

    One that succeeded keeps its result.
    """
    if not omit:
        raise UsageError("say how to resolve them", hint="--omit leaves them out of the run")
    asyncio.run(_omit(directory, rollout))
    if as_json:
        show_json({"omitted": rollout})
    else:
        print(f"{len(rollout)} omitted")


async def _omit(directory: Path, rollouts: list[str]) -> None:
    from gymckpt.collection import reopening

    from .edges import without_servers
    from .embedded import absolute

    async with without_servers() as ports, reopening.held(absolute(directory), ports) as opened:
        for rollout_id in rollouts:
            await reopening.omit(opened, rollout_id)
