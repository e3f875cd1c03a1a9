"""`gymckpt retry`: opens failed rollouts again."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gymckpt.errors import UsageError

from .console import show_json


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("retry", epilog="Examples: gymckpt retry runs/a --kind server_error · gymckpt retry runs/a --all")(
        retry
    )


def retry(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory that no collector holds.")],
    kind: Annotated[
        list[str] | None, typer.Option("--kind", metavar="KIND", help="Rollouts that failed for this reason.")
    ] = None,
    rollout: Annotated[list[str] | None, typer.Option("--rollout", metavar="ROLLOUT", help="Exactly these.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every failed rollout.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Opens failed rollouts again; a restore then sends their next attempts.

    Their earlier outcomes stay in the journal and no longer count. Without a choice the reasons are listed.
    """
    reopened, counts = asyncio.run(_retry(directory, set(kind or []), set(rollout or []), everything=everything))
    if as_json:
        show_json({"reopened": reopened, "failed_by_kind": counts})
    elif not (kind or rollout or everything):
        print("\n".join(f"{count:8} {name}" for name, count in counts.items()) or "no rollout has failed")
    else:
        print(f"{len(reopened)} rollouts are open again")
        if reopened:
            print(f"go on with: gymckpt restore {directory}")


async def _retry(
    directory: Path, kinds: set[str], rollouts: set[str], *, everything: bool
) -> tuple[list[str], dict[str, int]]:
    from gymckpt.collection import reopening

    from .edges import without_servers
    from .embedded import absolute

    async with without_servers() as ports, reopening.held(absolute(directory), ports) as opened:
        failed = await ports.offload.run(lambda: reopening.failed_rollouts(opened))
        known = {found.rollout_id for found in failed}
        if unknown := sorted(rollouts - known):
            raise UsageError(f"{unknown[0][:160]} is no failed rollout of this run")
        counts = dict(reopening.counts_by_kind(failed))
        if unknown := sorted(kinds - counts.keys()):
            raise UsageError(
                f"no rollout failed with {unknown[0][:80]!r}", hint=f"there are: {', '.join(counts) or '-'}"
            )
        chosen = [f for f in failed if everything or f.kind in kinds or f.rollout_id in rollouts]
        await reopening.reopen(opened, chosen, "retry")
        return [found.rollout_id for found in chosen], counts
