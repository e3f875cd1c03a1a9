"""Damaged, foreign and hostile files: the previous checkpoint or a clean refusal, never wrong data or a traceback."""

import hashlib
import random
from pathlib import PurePath
from typing import Any

import pytest
import zstandard

from gymckpt import jsoncodec
from gymckpt.errors import DamagedState, GymckptError
from gymckpt.identity import EpisodeId
from gymckpt.storage.frames import compress
from gymckpt.storage.index import read_lines
from gymckpt.storage.manifest import MANIFEST, IndexFact, Manifest, SegmentFact
from gymckpt.storage.published import CHECKPOINT, COLLECTION, PARTICIPANTS
from gymckpt.storage.sealing import seal
from tests.corruption import damages
from tests.simulation.files import MemoryFileSystem
from tests.storage.building import (
    ROOT,
    RUN_ID,
    checkpoint_id,
    directory,
    load,
    memory,
    opaque,
    part,
    publish,
    reader,
    record,
    run,
    store,
)

RECORDS = [record("r", [1, {"text": "two"}]), opaque("o", {"a": None})]


def two_checkpoints() -> MemoryFileSystem:
    fs = memory()

    async def both() -> None:
        _, written = await publish(fs, 1, RECORDS)
        await publish(fs, 2, [record("r", [1, {"text": "two"}, 3]), opaque("o", {"a": 1})], written.base)

    run(both())
    return fs


def of_second(fs: MemoryFileSystem) -> list[PurePath]:
    """The files that only the second checkpoint has."""
    shared = {entry.inode for entry in fs.scan(part(1))}
    own = [part(2) / entry.name for entry in fs.scan(part(2)) if entry.inode not in shared]
    return [ROOT / checkpoint_id(2) / CHECKPOINT, ROOT / checkpoint_id(2) / COLLECTION, *own]


async def newest(fs: MemoryFileSystem) -> int:
    found, problems = await directory(fs).newest_valid(RUN_ID)
    assert found is not None
    assert problems or found.collection.sequence == 2
    return found.collection.sequence


FEW = pytest.param(25, id="few")
ALL = pytest.param(None, id="all", marks=pytest.mark.slow)


@pytest.mark.parametrize("samples", [FEW, ALL])
def test_any_damage_to_the_newest_checkpoint_falls_back_to_the_one_before(samples: int | None) -> None:
    fs, rng = two_checkpoints(), random.Random(1)
    expected = run(load(fs, 1))

    async def try_all() -> None:
        for path in of_second(fs):
            whole = fs.read(path)
            for damaged in damages(whole, rng, samples=samples):
                fs.overwrite(path, damaged)
                assert await newest(fs) == 1, path.name
            fs.overwrite(path, whole)
            assert await newest(fs) == 2

    run(try_all())
    assert run(load(fs, 1)) == expected


@pytest.mark.parametrize("samples", [FEW, ALL])
def test_any_damage_to_a_participants_files_is_a_clean_refusal(samples: int | None) -> None:
    fs, rng = memory(), random.Random(2)

    async def try_all() -> None:
        await store(fs, 1, RECORDS)
        for entry in fs.scan(part(1)):
            path = part(1) / entry.name
            whole = fs.read(path)
            for damaged in damages(whole, rng, samples=samples):
                fs.overwrite(path, damaged)
                with pytest.raises(DamagedState, match=f"{part(1)}/"):
                    await load(fs, 1)
            fs.overwrite(path, whole)

    run(try_all())


def test_verify_names_file_frame_and_episodes_of_every_damage() -> None:
    fs, rng = memory(), random.Random(3)
    run(store(fs, 1, [opaque(f"o-{n}", rng.randbytes(300_000).hex()) for n in range(4)]))
    name = next(entry.name for entry in fs.scan(part(1)) if entry.name.startswith("segment"))
    whole = fs.read(part(1) / name)
    damaged = bytearray(whole)
    damaged[len(whole) * 5 // 8] ^= 4
    fs.overwrite(part(1) / name, bytes(damaged))
    problems = run(reader(fs, 1).verify())
    assert len(problems) == 1
    assert f"{part(1) / name} frame 2" in problems[0].what
    assert problems[0].episodes == (EpisodeId("o-2"),)
    assert not run(reader(fs, 1).verify(quick=True))
    fs.overwrite(part(1) / name, whole[:-1])
    assert run(reader(fs, 1).verify(quick=True))


def test_a_missing_file_is_named() -> None:
    for name in ("segment", "episodes", "manifest"):
        fs = memory()
        run(store(fs, 1, RECORDS))
        path = next(part(1) / entry.name for entry in fs.scan(part(1)) if entry.name.startswith(name))
        fs.unlink(path)
        with pytest.raises(DamagedState, match=f"{path} is missing"):
            run(load(fs, 1))


def test_a_symlink_in_place_of_a_file_or_directory_is_not_followed() -> None:
    for name in ("segment", "episodes", "manifest"):
        fs = memory()
        run(store(fs, 1, RECORDS))
        path = next(part(1) / entry.name for entry in fs.scan(part(1)) if entry.name.startswith(name))
        fs.unlink(path)
        fs.symlink(path)
        with pytest.raises(DamagedState, match=r"not a regular file|other of 0 bytes"):
            run(load(fs, 1))
    fs = memory()
    fs.make_root(ROOT / checkpoint_id(1))
    fs.symlink(ROOT / checkpoint_id(1) / PARTICIPANTS)
    with pytest.raises(DamagedState, match="gym is not a directory"):
        run(load(fs, 1))
    with pytest.raises(GymckptError):
        run(store(fs, 1, RECORDS))


class Hostile:
    """Files that are consistent with their digests, and lie."""

    def __init__(self) -> None:
        self.fs = memory()
        self.fs.make_root(part(1))

    def put(self, name: str, data: bytes) -> None:
        self.fs.create(part(1) / name).write(data)

    def build(
        self,
        lines: list[bytes],
        index: list[dict[str, Any]],
        *,
        segment: bytes | None = None,
        frames: list[list[int]] | None = None,
        manifest: dict[str, Any] | None = None,
    ) -> None:
        raw = b"".join(lines)
        data = compress(raw, 1) if segment is None else segment
        digest = hashlib.sha256(data).hexdigest()
        fact = SegmentFact(file=f"segment-{digest}.jsonl.zst", bytes=len(data), sha256=digest, raw_bytes=len(raw))
        table = frames or [[len(data), len(raw)]]
        rows = [{"segments": [{"file": fact.file, "frames": table}]}, *index]
        index_raw = b"".join(jsoncodec.dumps(row) + b"\n" for row in rows)
        index_data = compress(index_raw, 1)
        index_digest = hashlib.sha256(index_data).hexdigest()
        of_index = IndexFact(
            file=f"episodes-{index_digest}.jsonl.zst",
            bytes=len(index_data),
            sha256=index_digest,
            frames=[(len(index_data), len(index_raw))],
        )
        whole = Manifest(
            schema_version=1,
            format="gymckpt",
            kind="agent",
            instance="a",
            checkpoint_id="c",
            record_count=len(index),
            raw_bytes=len(raw),
            index=of_index,
            segments=[fact],
        )
        self.put(fact.file, data)
        self.put(of_index.file, index_data)
        self.put(MANIFEST, seal(whole.model_dump(mode="json") | (manifest or {})))

    def refused(self, match: str | None = None, **options: Any) -> None:
        async def read() -> None:
            opened = reader(self.fs, 1, **options)
            await opened.open()
            async for _ in opened.records():
                pass

        with pytest.raises(DamagedState, match=match):
            run(read())


LINE = b'{"rollout_id":"r","attempt":0,"part":0,"op":"full","record":{"a":1}}\n'


def row(rollout: str = "r", attempt: int = 0, parts: Any = None, **more: Any) -> dict[str, Any]:
    parts = [[0, 0, 0, len(LINE)]] if parts is None else parts
    fixed = {"rollout_id": rollout, "attempt": attempt, "boundary": None, "turns": 0, "bytes": len(LINE), "needs": None}
    return fixed | {"parts": parts} | more


def test_the_hostile_builder_builds_what_can_be_read() -> None:
    hostile = Hostile()
    hostile.build([LINE], [row()])
    assert run(load(hostile.fs, 1)) == {EpisodeId("r"): {"a": 1}}


def test_a_bomb_is_refused_before_it_swells() -> None:
    hostile = Hostile()
    zeros = 1 << 28
    engine = zstandard.ZstdCompressor(level=1, write_checksum=True).compressobj(size=zeros)
    bomb = b"".join(engine.compress(bytes(1 << 26)) for _ in range(zeros >> 26)) + engine.flush()
    hostile.build([LINE], [row()], segment=bomb)
    hostile.refused("does not say 69 bytes")
    hostile = Hostile()
    hostile.build([LINE], [row()], segment=bomb, frames=[[len(bomb), zeros]])
    hostile.refused("do not hold 69 bytes")
    without_size = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(bytes(1 << 20))
    hostile = Hostile()
    hostile.build([LINE], [row()], segment=without_size)
    hostile.refused("does not say")


def test_a_frame_without_checksum_is_refused() -> None:
    hostile = Hostile()
    hostile.build([LINE], [row()], segment=zstandard.ZstdCompressor(write_checksum=False).compress(LINE))
    hostile.refused("with a checksum")


def test_two_frames_where_one_is_named_are_refused() -> None:
    hostile = Hostile()
    hostile.build([LINE], [row()], segment=compress(LINE, 1) + compress(LINE, 1))
    hostile.refused("frame 0")


@pytest.mark.parametrize(
    "index",
    [
        [row(), row()],
        [row("../../etc")],
        [row("r-a1")],
        [row("x" * 200)],
        [row(attempt=-1)],
        [row(attempt=10**12)],
        [row(attempt=True)],
        [row(parts=[])],
        [row(parts=[[0, 0, 0, 10**15]])],
        [row(parts=[[0, 0, 10**15, 10]])],
        [row(parts=[[0, 10**15, 0, 10]])],
        [row(parts=[[10**15, 0, 0, 10]])],
        [row(parts=[[0, 0, 0, 5]])],
        [row(parts=[[0, 0, -1, 5]])],
        [row(parts=[[0, 0, 0, len(LINE)], [0, 0, 0, len(LINE)]])],
        [row("other")],
        [row(boundary={"step": 1, "number": 0, "at": 0})],
        [row(needs=[["agent", "../x"]])],
        [row(needs=[["nobody", "x"]])],
        [row(turns="many")],
        [row(bytes=len(LINE) - 1)],
        [{}],
        [{"rollout_id": None}],
    ],
)
def test_an_index_that_lies_is_refused(index: list[dict[str, Any]]) -> None:
    hostile = Hostile()
    hostile.build([LINE], index)
    hostile.refused()


@pytest.mark.parametrize("damage", [-1, "69", 1.5, True, None, [69]])
@pytest.mark.parametrize("field", ["turns", "bytes"])
def test_a_count_in_the_index_that_is_none_names_frame_and_episode(field: str, damage: Any) -> None:
    hostile = Hostile()
    hostile.build([LINE], [row("whole"), row(**{field: damage})])
    hostile.refused(rf"episodes-\w+.jsonl.zst frame 0: the line of 'r' is not as we write it: .*{field}")
    (problem,) = run(reader(hostile.fs, 1).verify(quick=True))
    assert "the line of 'r'" in problem.what


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([row(), row("s"), row()], "frame 0: r is listed twice"),
        ([row(attempt=2), row(attempt=2)], "frame 0: r-a2 is listed twice"),
        ([row(), {"attempt": 0}], "frame 0: a line that names no episode"),
        ([row(needs=[["agent", "../x"]])], "frame 0: the line of 'r' is not as we write it: its needs"),
    ],
)
def test_damage_of_the_index_names_frame_and_episode(index: list[dict[str, Any]], message: str) -> None:
    hostile = Hostile()
    hostile.build([LINE], index)
    hostile.refused(message)


def test_an_episode_in_two_frames_of_an_index_is_refused() -> None:
    seen: set[tuple[str, int]] = set()
    line = jsoncodec.dumps(row()) + b"\n"
    read_lines(line, "frame 0", seen)
    with pytest.raises(DamagedState, match="frame 1: r is listed twice"):
        read_lines(line, "frame 1", seen)


@pytest.mark.parametrize("damage", [{"tails": []}, {"lists": {"/l": [1, 2]}}, {"lists": {"/l": [-1]}}])
def test_what_the_next_commit_needs_of_an_index_is_verified(damage: dict[str, Any]) -> None:
    hostile = Hostile()
    hostile.build([LINE], [row(**damage)])
    (problem,) = run(reader(hostile.fs, 1).verify(quick=True))
    assert problem.episodes == (EpisodeId("r"),)


@pytest.mark.parametrize(
    "line",
    [
        b"{}\n",
        b"[]\n",
        b"null\n",
        b"not json at all\n",
        b'{"rollout_id":"r","attempt":0,"part":0,"op":"full","record":[]}\n',
        b'{"rollout_id":"r","attempt":0,"part":0,"op":"append","head":{},"lists":{}}\n',
        b'{"rollout_id":"r","attempt":1,"part":0,"op":"full","record":{}}\n',
        b'{"rollout_id":"s","attempt":0,"part":0,"op":"full","record":{}}\n',
        b'{"rollout_id":"r","attempt":0,"part":0,"op":"more","record":{}}\n',
        b"[" * 100_000 + b"\n",
        b'{"a":' * 2000 + b"\n",
    ],
)
def test_a_part_that_is_none_is_refused(line: bytes) -> None:
    hostile = Hostile()
    hostile.build([line], [row(parts=[[0, 0, 0, len(line)]])])
    hostile.refused()


@pytest.mark.parametrize(
    "lists",
    [
        '{"/x":{"from":0,"items":[]}}',
        '{"/l":{"from":2,"items":[]}}',
        '{"/l":{"from":0}}',
        '{"/l":[]}',
        '{"":{"from":0,"items":[]}}',
        '{"/d":{"from":0,"items":[]}}',
        '{"/l/0/0":{"from":0,"items":[]}}',
        "[]",
    ],
)
def test_an_append_that_does_not_fit_is_refused(lists: str) -> None:
    first = b'{"rollout_id":"r","attempt":0,"part":0,"op":"full","record":{"l":[],"d":{}}}\n'
    second = (
        f'{{"rollout_id":"r","attempt":0,"part":1,"op":"append","head":{{"l":[],"d":{{}}}},"lists":{lists}}}\n'.encode()
    )
    hostile = Hostile()
    hostile.build([first, second], [row(parts=[[0, 0, 0, len(first)], [0, 0, len(first), len(second)]])])
    hostile.refused()


def test_a_record_above_the_limit_is_refused_in_reading() -> None:
    hostile = Hostile()
    line = LINE.replace(b"1}", b'"' + b"x" * (3 << 20) + b'"}')
    hostile.build([line], [row(parts=[[0, 0, 0, len(line)]], bytes=len(line))])
    hostile.refused("than the .* allowed", max_record_bytes=1 << 20)


@pytest.mark.parametrize(
    "change",
    [
        {"index": {"file": "episodes-../../x.jsonl.zst", "bytes": 1, "sha256": "0" * 64, "frames": [[1, 1]]}},
        {"segments": [{"file": "/etc/passwd", "bytes": 1, "sha256": "0" * 64, "raw_bytes": 1}]},
        {"segments": [{"file": "manifest.json", "bytes": 1, "sha256": "0" * 64, "raw_bytes": 1}]},
        {"record_count": -1},
        {"record_count": 2},
        {"record_count": 10**30},
        {"kind": "model"},
        {"kind": "nobody"},
        {"instance": "b"},
        {"instance": "../b"},
        {"checkpoint_id": "a/b"},
        {"schema_version": 2},
        {"format": "other"},
        {"segments": []},
        {"unknown": 1},
        {"index": None},
    ],
)
def test_a_manifest_that_lies_is_refused(change: dict[str, Any]) -> None:
    hostile = Hostile()
    hostile.build([LINE], [row()], manifest=change)
    hostile.refused()


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff" * 100, b'{"records_file":1}', b"[" * 5000])
def test_a_manifest_that_is_none_is_refused(data: bytes) -> None:
    hostile = Hostile()
    hostile.put(MANIFEST, data)
    hostile.refused("manifest")


def test_an_oversized_manifest_is_refused_unread() -> None:
    hostile = Hostile()
    hostile.put(MANIFEST, bytes(20 << 20))
    hostile.refused("more than the")
