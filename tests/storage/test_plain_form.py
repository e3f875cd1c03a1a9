"""The directories of Gym's own participants are read and verified, and ours are written in that form."""

import hashlib
import json
import random
from pathlib import PurePath
from typing import Any

import pytest

from gymckpt.errors import DamagedState, NotAsAsked
from gymckpt.identity import EpisodeId
from gymckpt.storage.plainexport import export_plain
from gymckpt.storage.records import Record
from tests.corruption import damages
from tests.simulation.files import MemoryFileSystem
from tests.storage.building import (
    INLINE,
    RUN,
    RUN_ID,
    checkpoint_id,
    collection,
    directory,
    load,
    memory,
    opaque,
    part,
    reader,
    record,
    run,
    store,
)

RECORDS: list[Record] = [
    {"episode_id": {"rollout_id": "r", "attempt": 2}, "boundary": {"step": "verify"}, "task_digest": "d"},
    {"episode_id": {"rollout_id": "s", "attempt": 0}, "state": {"text": "a\u2028b\u0085c"}, "boundary": None},
]


def put(fs: MemoryFileSystem, records: list[Any], **change: Any) -> None:
    """As Gym writes it."""
    data = b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)
    digest = hashlib.sha256(data).hexdigest()
    manifest = {
        "schema_version": 1,
        "kind": "agent",
        "instance": "a",
        "checkpoint_id": "ckpt-000001-00000001",
        "records_file": f"records-{digest}.jsonl",
        "records_sha256": digest,
        "record_count": len(records),
    }
    fs.make_root(part(1))
    fs.create(part(1) / f"records-{digest}.jsonl").write(data)
    fs.create(part(1) / "manifest.json").write(json.dumps(manifest | change).encode())


def test_gyms_records_are_read_listed_and_verified() -> None:
    fs = memory()
    put(fs, RECORDS)

    async def look() -> None:
        assert list((await load(fs, 1)).values()) == RECORDS
        assert list(await load(fs, 1, {"r": 2})) == [EpisodeId("r", 2)]
        opened = reader(fs, 1)
        await opened.open()
        first, second = opened.index()
        assert (first.episode, str(first.boundary), second.boundary) == (EpisodeId("r", 2), "verify/0", None)
        assert not await opened.verify()
        assert opened.base({"r": 3}).chains == {}

    run(look())


def test_a_checkpoint_of_gyms_participants_can_be_published_and_found() -> None:
    fs = memory()
    put(fs, RECORDS)

    async def look() -> None:
        await directory(fs).publish(checkpoint_id(1), collection(1), expected=[("agent", "a")])
        found, problems = await directory(fs).newest_valid(RUN_ID)
        assert found is not None
        assert not problems
        assert not await directory(fs).verify(found)

    run(look())


@pytest.mark.parametrize("samples", [pytest.param(80, id="few"), pytest.param(None, id="all", marks=pytest.mark.slow)])
def test_any_damage_to_gyms_records_is_a_clean_refusal(samples: int | None) -> None:
    fs, rng = memory(), random.Random(3)
    put(fs, RECORDS)

    async def try_all() -> None:
        for entry in fs.scan(part(1)):
            if entry.name.startswith("records"):
                whole = fs.read(part(1) / entry.name)
                for damaged in damages(whole, rng, samples=samples):
                    fs.overwrite(part(1) / entry.name, damaged)
                    with pytest.raises(DamagedState):
                        await load(fs, 1)

    run(try_all())


@pytest.mark.parametrize(
    "change",
    [
        {"records_file": "../../etc/passwd"},
        {"records_file": "records-" + "0" * 64 + ".jsonl"},
        {"records_sha256": "0" * 64},
        {"record_count": 3},
        {"record_count": -1},
        {"schema_version": 2},
        {"kind": "model"},
        {"instance": "b"},
        {"checkpoint_id": "../x"},
    ],
)
def test_a_manifest_of_gyms_that_lies_is_refused(change: dict[str, Any]) -> None:
    fs = memory()
    put(fs, RECORDS, **change)
    with pytest.raises(DamagedState):
        run(load(fs, 1))


@pytest.mark.parametrize(
    "records", [[RECORDS[0], RECORDS[0]], [{}], [[]], [{"episode_id": "r"}], [{"episode_id": {"rollout_id": "../x"}}]]
)
def test_records_of_gyms_that_name_no_episode_or_one_twice_are_refused(records: list[Any]) -> None:
    fs = memory()
    put(fs, records)
    with pytest.raises(DamagedState):
        run(load(fs, 1))


def test_ours_exported_in_gyms_form_reads_back_equal() -> None:
    fs = memory()
    target: PurePath = RUN / "exported" / "gym" / "agent" / "a"

    async def export() -> None:
        base = (await store(fs, 1, [record("r", [1]), opaque("o", {"z": 1, "a": None})])).base
        await store(fs, 2, [record("r", [1, "\ud800", 2**70]), opaque("o", {"z": 1, "a": None})], base)
        opened = reader(fs, 2)
        await opened.open()
        manifest = await export_plain(fs, INLINE, opened, target, kind="agent", instance="a")
        assert manifest["record_count"] == 2
        assert manifest == json.loads(fs.read(target / "manifest.json"))
        fs.make_root(part(5))
        for entry in fs.scan(target):
            fs.create(part(5) / entry.name).write(fs.read(target / entry.name))
        assert await load(fs, 5) == await load(fs, 2)
        assert await export_plain(fs, INLINE, opened, target, kind="agent", instance="a") == manifest
        other = reader(fs, 1)
        await other.open()
        with pytest.raises(NotAsAsked):
            await export_plain(fs, INLINE, other, target, kind="agent", instance="a")
        assert not [entry for entry in fs.scan(target) if entry.name.startswith(".")]

    run(export())
