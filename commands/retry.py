"""`gymckpt retry`: opens failed rollouts again, or has answers judged again."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gymckpt.errors import UsageError
from gymckpt.ports import ServerRef
from gymckpt.report.words import visible

from .console import note, show_json
from .status import server_of
from .tokens import control_token

if TYPE_CHECKING:
    from gymckpt.collection.rejudging import Rejudged

SHOWN = 10


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(
        "retry",
        epilog="Examples: gymckpt retry runs/a --kind server_error · gymckpt retry runs/a --all · "
        "gymckpt retry runs/a --verify-only --url answer_match=http://127.0.0.1:8005",
    )(retry)


def retry(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory that no collector holds.")],
    kind: Annotated[
        list[str] | None, typer.Option("--kind", metavar="KIND", help="Rollouts that failed for this reason.")
    ] = None,
    rollout: Annotated[list[str] | None, typer.Option("--rollout", metavar="ROLLOUT", help="Exactly these.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every failed rollout.")] = False,
    verify_only: Annotated[
        bool, typer.Option("--verify-only", help="Keep the answers of succeeded rollouts and judge them again.")
    ] = False,
    url: Annotated[
        str | None, typer.Option("--url", metavar="NAME=URL", help="With --verify-only: the resources server to ask.")
    ] = None,
    taskset: Annotated[
        str | None, typer.Option("--taskset", metavar="NAME", help="With --verify-only: rollouts of this task set.")
    ] = None,
    control_token_file: Annotated[
        Path | None,
        typer.Option("--control-token-file", metavar="FILE", help="Holds the control token; or GYMCKPT_CONTROL_TOKEN."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Opens failed rollouts again; a restore then sends their next attempts.

    Their earlier outcomes stay in the journal and no longer count. Without a choice the reasons are listed.
    --verify-only runs no agent: each answer goes to the verifier again, whose new verdict counts at once.
    """
    if verify_only:
        if kind or everything or url is None:
            raise UsageError("--verify-only takes --url NAME=URL, and --rollout or --taskset to choose")
        judged = asyncio.run(_judge(directory, server_of(url), taskset, set(rollout or []), control_token_file))
        _show_judged(judged, as_json=as_json)
        return
    if url or taskset:
        raise UsageError("--url and --taskset go with --verify-only")
    reopened, counts = asyncio.run(_retry(directory, set(kind or []), set(rollout or []), everything=everything))
    if as_json:
        show_json({"reopened": reopened, "failed_by_kind": counts})
    elif not (kind or rollout or everything):
        print("\n".join(f"{count:8} {visible(name)}" for name, count in counts.items()) or "no rollout has failed")
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


async def _judge(
    directory: Path, verifier: ServerRef, taskset: str | None, rollouts: set[str], token_file: Path | None
) -> "Rejudged":
    from gymckpt.collection import rejudging, reopening

    from .edges import with_connections
    from .embedded import absolute

    async with with_connections(rejudging.AT_ONCE) as ports:
        await rejudging.check_replayable(ports, verifier, control_token(token_file))
        async with reopening.held(absolute(directory), ports) as opened:
            return await rejudging.judge_again(opened, ports, verifier, taskset=taskset, rollouts=rollouts)


def _show_judged(judged: "Rejudged", *, as_json: bool) -> None:
    if as_json:
        show_json({"judged": judged.judged, "changed": judged.changed, "kept": judged.kept})
        return
    print(f"{len(judged.judged)} judged again, {judged.changed} with another reward")
    for name, why in list(judged.kept.items())[:SHOWN]:
        note(f"{name} keeps its verdict: {why}")
    if len(judged.kept) > SHOWN:
        note(f"and {len(judged.kept) - SHOWN} more; --json lists all")
