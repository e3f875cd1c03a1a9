"""Run directories before a collector opens them: a new name, and a look that spares servers a start for nothing."""

import asyncio
import secrets
from datetime import UTC, datetime
from pathlib import Path

from gymckpt.collection.opening import refuse_holding
from gymckpt.collection.rundirectory import RunPaths, holding
from gymckpt.collection.settings import CollectSettings
from gymckpt.ports import FileSystem, Offload
from gymckpt.report.inspection import read_counts

RUNS = Path("runs")


def fresh_directory() -> Path:
    """`runs/<utc>-<id>`: two runs that begin in one second differ by the id."""
    return RUNS / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


def check_place(fs: FileSystem, offload: Offload, root: Path, settings: CollectSettings, *, restore: bool) -> bool:
    """Whether there is work for servers in `root`. The collector looks again, under its lock.

    Raises what it would raise for a directory that holds something else than was asked for.
    """
    paths = RunPaths(root)
    found = holding(fs, paths)
    refuse_holding(root, found, settings, restore=restore)
    if found != "run" or (settings.overwrite and not restore):
        return True
    _, counts = asyncio.run(read_counts(fs, offload, paths))
    return counts.unresolved > 0
