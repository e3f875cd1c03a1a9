"""The results of a run in one stream, sorted by (task, repeat), from the journal."""

from collections.abc import AsyncIterator

from gymckpt.collection.reading import look
from gymckpt.collection.rundirectory import RunPaths
from gymckpt.errors import DamagedState
from gymckpt.jsoncodec import dumps
from gymckpt.ports import FileSystem, Offload, SystemClock
from gymckpt.storage.outcomes import Outcome as StoredOutcome


async def export_rows(fs: FileSystem, offload: Offload, paths: RunPaths) -> AsyncIterator[bytes]:
    """The row of each succeeded rollout as a line; only places are held in memory. Raises `DamagedState`."""
    view = await look(fs, offload, SystemClock(), paths)
    run, journals = view.run, view.journals

    def places() -> list[tuple[tuple[int, int], StoredOutcome]]:
        found: dict[tuple[int, int], StoredOutcome] = {}
        for outcome, stored in journals.outcomes():
            rollout_id = outcome.episode.rollout_id
            if outcome.final and outcome.outcome == "succeeded" and outcome.opening == run.opening(rollout_id):
                # The first one counts: a later one for the same opening was refused when it came.
                found.setdefault(run.place(rollout_id), stored)
        return sorted(found.items())

    for (task, repeat), stored in await offload.run(places):
        row = await journals.row(stored)
        if row is None:
            raise DamagedState(f"{paths.journal}: the outcome of task {task}, repeat {repeat} has no row")
        yield dumps(row) + b"\n"
