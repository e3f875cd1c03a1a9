"""Rules of prefixes: beside the records, named by the manifest, given back to the episode they came with."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gymckpt import crashpoints
from gymckpt.errors import NoSpace
from gymckpt.identity import EpisodeId
from gymckpt.ports import ThreadOffload
from gymckpt.storage.files import LocalFileSystem
from gymckpt.storage.prefixes import PREFIX
from gymckpt.storage.reader import ParticipantReader
from gymckpt.storage.records import ExportedRecord
from gymckpt.storage.writer import PREFIXES_BEFORE_LINK, ParticipantWriter

FS, OFFLOAD = LocalFileSystem(), ThreadOffload()


def export(number: int, prefix: dict[str, Any] | None) -> ExportedRecord:
    return ExportedRecord(EpisodeId(f"r-{number}", number), {"rows": [number]}, prefix=prefix)


def writer(directory: Path, checkpoint: str = "ckpt-000001-00000000", base: Any = None) -> ParticipantWriter:
    return ParticipantWriter(FS, OFFLOAD, directory, checkpoint_id=checkpoint, kind="model", instance="m", base=base)


async def read(directory: Path, scope: dict[str, int] | None = None) -> dict[str, Any]:
    reader = ParticipantReader(FS, OFFLOAD, directory, kind="model", instance="m")
    await reader.open()
    return {stored.episode.capture_key: stored.prefix async for stored in reader.records(scope)}


def test_each_episode_gets_its_own_prefix_back_and_a_checkpoint_without_any_has_no_such_file(tmp_path: Path) -> None:
    async def work() -> None:
        first, second = tmp_path / "a" / "gym" / "model" / "m", tmp_path / "b" / "gym" / "model" / "m"
        one = writer(first)
        prefixes = {n: {"token_ids": list(range(n * 1000)), "log_probs": [-0.5] * n} for n in (1, 3)}
        for number in range(5):
            await one.add(export(number, prefixes.get(number)))
        written = await one.finish()
        assert await read(first) == {
            "r-0": None,
            "r-1-a1": prefixes[1],
            "r-2-a2": None,
            "r-3-a3": prefixes[3],
            "r-4-a4": None,
        }
        assert await read(first, {"r-3": 9}) == {"r-3-a3": prefixes[3]}
        two = writer(second, "ckpt-000002-00000000", written.base)
        for number in range(5):
            await two.add(export(number, None))
        await two.finish()
        assert set((await read(second)).values()) == {None}

    asyncio.run(work())
    assert len(list(tmp_path.glob(f"a/gym/model/m/{PREFIX}*"))) == 1
    assert not list(tmp_path.glob(f"b/gym/model/m/{PREFIX}*"))


def test_a_commit_that_failed_at_its_prefixes_stores_the_same_ones_when_tried_again(tmp_path: Path) -> None:
    async def work() -> None:
        directory = tmp_path / "gym" / "model" / "m"
        one = writer(directory)
        await one.add(export(1, {"token_ids": [1, 2, 3]}))
        crashpoints.arm(f"{PREFIXES_BEFORE_LINK}:enospc")
        try:
            with pytest.raises(NoSpace):
                await one.finish()
        finally:
            crashpoints.arm(None)
        await one.finish()
        assert await read(directory) == {"r-1-a1": {"token_ids": [1, 2, 3]}}

    asyncio.run(work())
