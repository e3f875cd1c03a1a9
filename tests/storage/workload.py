"""A small run for tests that kill it or cut its power: `python -m tests.storage.workload DIRECTORY`.

It publishes checkpoints and appends to both journals, and says `published N` or `appended N` once each is durable.
"""

import asyncio
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gymckpt.errors import NoSpace
from gymckpt.identity import EpisodeId
from gymckpt.ports import ThreadOffload
from gymckpt.storage.base import Base
from gymckpt.storage.checkpoints import CheckpointDirectory, Collection
from gymckpt.storage.files import LocalFileSystem
from gymckpt.storage.journal import Journal
from gymckpt.storage.journalfiles import newest_epoch
from gymckpt.storage.outcomes import OutcomesJournal
from gymckpt.storage.reader import ParticipantReader
from gymckpt.storage.records import Record
from gymckpt.storage.writer import ParticipantWriter
from tests.storage.building import RUN_ID, checkpoint_id, opaque, record

FS = LocalFileSystem()
OFFLOAD = ThreadOffload(ThreadPoolExecutor(1))
"""One thread: its system calls can be counted."""
CHECKPOINTS = 3


def states(sequence: int) -> dict[EpisodeId, Record]:
    exports = [record("r", [{"n": n, "text": "x" * 3000} for n in range(sequence)]), opaque("o", "y" * sequence)]
    return {exported.episode: exported.record for exported in exports}


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


async def work(directory: Path) -> None:
    checkpoints = CheckpointDirectory(FS, OFFLOAD, directory / "checkpoints")
    journal = Journal(FS, OFFLOAD, directory / "journal", "dispatch", epoch=1)
    outcomes = OutcomesJournal(FS, OFFLOAD, directory / "journal", "outcomes", epoch=1)
    await journal.open()
    await outcomes.open()
    base: Base | None = None
    for sequence in range(1, CHECKPOINTS + 1):
        await journal.append({"n": sequence})
        await outcomes.append({"n": sequence}, "z" * 2000)
        say(f"appended {sequence}")
        place = await checkpoints.begin(checkpoint_id(sequence)) / "gym" / "agent" / "a"
        writer = ParticipantWriter(
            FS, OFFLOAD, Path(place), checkpoint_id=checkpoint_id(sequence), kind="agent", instance="a", base=base
        )
        items = [{"n": n, "text": "x" * 3000} for n in range(sequence)]
        for exported in (record("r", items), opaque("o", "y" * sequence)):
            await writer.add(exported)
        base = (await writer.finish()).base
        collection = Collection(checkpoint_id(sequence), RUN_ID, sequence, 1, 1.0)
        await checkpoints.publish(checkpoint_id(sequence), collection)
        say(f"published {sequence}")
        await checkpoints.prune(1)


async def check(directory: Path, said: Iterable[str]) -> None:
    """After anything: what was said is there, and the run can go on."""
    reported = {"published": 0, "appended": 0}
    for line in said:
        what, _, number = line.partition(" ")
        reported[what] = int(number)
    checkpoints = CheckpointDirectory(FS, OFFLOAD, directory / "checkpoints")
    found, _ = await checkpoints.newest_valid(RUN_ID)
    sequence = found.collection.sequence if found else 0
    assert sequence >= reported["published"], (sequence, reported)
    if found is not None:
        assert not await checkpoints.verify(found)
        reader = ParticipantReader(FS, OFFLOAD, found.directory("agent", "a"), kind="agent", instance="a")
        await reader.open()
        assert {stored.episode: stored.record async for stored in reader.records()} == states(sequence)
    epoch = newest_epoch(FS, directory / "journal") + 1
    for journal in (
        Journal(FS, OFFLOAD, directory / "journal", "dispatch", epoch=epoch),
        OutcomesJournal(FS, OFFLOAD, directory / "journal", "outcomes", epoch=epoch),
    ):
        await journal.open()
        events = [event["n"] for event in journal.replay()]
        assert events == list(range(1, len(events) + 1))
        assert len(events) >= reported["appended"]
        await journal.append({"n": len(events) + 1})
        await journal.close()


if __name__ == "__main__":
    try:
        asyncio.run(work(Path(sys.argv[1])))
    except NoSpace as error:
        sys.exit(error.exit_code)
