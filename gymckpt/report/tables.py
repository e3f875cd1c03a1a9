"""Documents as tables for people."""

import time
from collections.abc import Iterable

from rich.table import Table

from gymckpt.report.documents import ServerView
from gymckpt.report.words import duration


def plain_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A table without a box, fit for a terminal and for a pipe; columns in `right` are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    to_the_right = set(right)
    for column in columns:
        table.add_column(column, justify="right" if column in to_the_right else "left", overflow="fold")
    return table


def servers_table(servers: Iterable[ServerView], now_s: float | None = None) -> Table:
    """The status of each server."""
    now_s = time.time() if now_s is None else now_s
    table = plain_table("server", "kind", "phase", "lease", "in flight", "blockers", "restarts", "url", right=["lease"])
    for server in servers:
        if server.problem is not None:
            table.add_row(
                server.instance, server.kind or "-", f"[red]{server.problem}[/red]", "", "", "", "", server.url
            )
            continue
        lease = "-" if server.lease_expires_at is None else duration(server.lease_expires_at - now_s)
        counts = " ".join(f"{name} {count}" for name, count in server.in_flight.items() if count) or "-"
        blockers = ", ".join(server.blockers[:3]) or "-"
        if server.blocker_count > 3:
            blockers += f" (+{server.blocker_count - 3})"
        table.add_row(
            server.instance,
            server.kind or "no participant",
            server.phase or "-",
            lease,
            counts,
            blockers,
            str(server.restarts),
            server.url,
        )
    return table
