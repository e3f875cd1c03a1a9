"""A commit costs what is new, is complete by itself, and comes back equal."""

import errno
import math
import os
import tracemalloc
from pathlib import PurePath

import pytest

from gymckpt.identity import EpisodeId
from gymckpt.storage.frames import FRAME_BYTES
from gymckpt.storage.manifest import MAX_FILES, MAX_SEGMENTS
from tests.simulation.files import MemoryFileSystem
from tests.storage.building import chain_of, load, memory, opaque, part, reader, record, run, store, writer

ANY = [1, "two", None, {"three": [3.5, math.inf]}, 2**80, "\ud800", "\u2028\u0085"]


def new_bytes(fs: MemoryFileSystem, sequence: int, before: set[int]) -> int:
    return sum(entry.size_bytes for entry in fs.scan(part(sequence)) if entry.inode not in before)


def inodes(fs: MemoryFileSystem, sequence: int) -> set[int]:
    return {entry.inode for entry in fs.scan(part(sequence))}


def test_records_come_back_with_values_and_key_order() -> None:
    fs = memory()
    records = [record(f"r-{n}", ANY * n, z=1, a={"y": 1, "b": 2}) for n in range(5)] + [opaque("o", {"k": ANY})]
    written = run(store(fs, 1, records))
    found = run(load(fs, 1))
    assert repr(found) == repr({r.episode: r.record for r in records})
    assert written.episodes == [r.episode for r in records]


def test_the_index_tells_all_but_the_payload() -> None:
    fs = memory()

    async def look() -> None:
        await store(fs, 1, [record("r", [1, 2]), opaque("o", 1)])
        opened = reader(fs, 1)
        await opened.open()
        first, second = opened.index()
        assert (first.episode, str(first.boundary), first.turns) == (EpisodeId("r"), "invoke_agent/2", 2)
        assert first.needs == (("agent", "a"),)
        assert (str(second.boundary), second.turns, second.needs) == ("invoke_agent/1", 0, ())
        assert opened.record_count == 2
        assert not await opened.verify()

    run(look())


def test_an_unchanged_revision_writes_nothing() -> None:
    fs = memory()

    async def twice() -> None:
        first = await store(fs, 1, [opaque("o", ["x" * 1000], revision=3)])
        await store(fs, 2, [opaque("o", "never looked at", revision=3)], first.base)
        assert new_bytes(fs, 2, inodes(fs, 1)) < 2000
        assert (await load(fs, 2))[EpisodeId("o")]["state"] == ["x" * 1000]

    run(twice())


def test_without_revisions_equal_bytes_write_nothing_and_other_bytes_are_seen() -> None:
    fs = memory()

    async def commits() -> None:
        first = await store(fs, 1, [opaque("o", 1), record("r", [1])])
        second = await store(fs, 2, [opaque("o", 1), record("r", [1])], first.base)
        assert second.manifest["segments"] == first.manifest["segments"]
        third = await store(fs, 3, [opaque("o", 1.0), record("r", [1], usage=2)], second.base)
        assert len(third.manifest["segments"]) == 2
        found = await load(fs, 3)
        assert repr(found[EpisodeId("o")]["state"]) == "1.0"
        assert found[EpisodeId("r")]["usage"] == 2

    run(commits())


def test_new_items_of_an_append_only_list_are_all_that_is_written() -> None:
    fs = memory()
    items = [{"text": os.urandom(400).hex()} for _ in range(200)]

    async def commits() -> None:
        first = await store(fs, 1, [record("r", items[:199])])
        await store(fs, 2, [record("r", items)], first.base)
        assert (await load(fs, 2))[EpisodeId("r")]["session"]["items"] == items

    run(commits())
    assert new_bytes(fs, 2, inodes(fs, 1)) < len(str(items)) / 20


def test_a_live_list_is_stored_as_long_as_it_was_pinned() -> None:
    fs = memory()

    async def commit() -> None:
        live = [1, 2, 3]
        exported = record("r", live)
        into = writer(fs, 1)
        await into.add(exported)
        live.append(4)
        written = await into.finish()
        assert (await load(fs, 1))[EpisodeId("r")]["session"]["items"] == [1, 2, 3]
        await store(fs, 2, [record("r", live)], written.base)
        assert (await load(fs, 2))[EpisodeId("r")]["session"]["items"] == [1, 2, 3, 4]

    run(commit())


@pytest.mark.parametrize("later", [["x"], [], ["a", "b"]])
def test_another_attempt_from_input_never_continues_the_stored_lists(later: list[str]) -> None:
    fs = memory()

    async def commits() -> None:
        first = await store(fs, 1, [record("r", ["x"])])
        await store(fs, 2, [record("r", later, attempt=1)], first.base)
        assert (await load(fs, 2))[EpisodeId("r", 1)]["session"]["items"] == later

    run(commits())


def test_a_list_that_shrank_is_written_whole() -> None:
    fs = memory()

    async def commits() -> None:
        first = await store(fs, 1, [record("r", [1, 2, 3])])
        await store(fs, 2, [record("r", [9])], first.base)
        assert (await load(fs, 2))[EpisodeId("r")]["session"]["items"] == [9]

    run(commits())


def test_large_records_after_many_small_ones_are_not_encoded_all_at_once() -> None:
    fs, large = memory(), "x" * FRAME_BYTES
    small = [opaque(f"s-{number}", number) for number in range(300)]
    tracemalloc.start()
    try:
        run(store(fs, 1, [*small, *(opaque(f"l-{number}", large) for number in range(200))]))
        assert tracemalloc.get_traced_memory()[1] < 100 * FRAME_BYTES
    finally:
        tracemalloc.stop()


def test_a_list_that_was_replaced_by_a_longer_one_is_written_whole() -> None:
    fs = memory()

    async def commits() -> None:
        first = await store(fs, 1, [record("r", [1, 2, 3])])
        await store(fs, 2, [record("r", [7, 8, 9, 10])], first.base)
        assert (await load(fs, 2))[EpisodeId("r")]["session"]["items"] == [7, 8, 9, 10]

    run(commits())


def test_user_data_that_looks_like_a_placeholder_stays() -> None:
    fs = memory()

    async def commits() -> None:
        first = await store(fs, 1, [record("r", [], empty=[])])
        second = await store(fs, 2, [record("r", [[]], empty=[])], first.base)
        await store(fs, 3, [record("r", [[], []], empty=[])], second.base)
        found = (await load(fs, 3))[EpisodeId("r")]
        assert (found["session"]["items"], found["empty"]) == ([[], []], [])

    run(commits())


def test_after_a_restore_the_installed_attempt_goes_on_where_the_stored_one_was() -> None:
    fs = memory()
    items = [{"text": os.urandom(400).hex()} for _ in range(100)]

    async def commits() -> None:
        await store(fs, 1, [record("r", items), record("left", [1])])
        opened = reader(fs, 1)
        await opened.open()
        base = opened.base({"r": 3})
        await store(fs, 2, [record("r", [*items, 1], attempt=3), record("left", [2], attempt=1)], base)
        found = await load(fs, 2)
        assert found[EpisodeId("r", 3)]["session"]["items"] == [*items, 1]
        assert found[EpisodeId("left", 1)]["session"]["items"] == [2]

    run(commits())
    assert new_bytes(fs, 2, inodes(fs, 1)) < 2500


def test_the_highest_attempt_not_above_the_scope_is_read() -> None:
    fs = memory()

    async def commits() -> None:
        await store(fs, 1, [record("r", [n], attempt=n) for n in (0, 2, 5)])
        assert list(await load(fs, 1, {"r": 4})) == [EpisodeId("r", 2)]
        assert list(await load(fs, 1, {"r": 7, "unknown": 1})) == [EpisodeId("r", 5)]
        assert not await load(fs, 1, {})

    run(commits())


@pytest.mark.parametrize("gone", [1, 3, 5])
def test_a_segment_that_is_gone_is_written_again(gone: int) -> None:
    fs = memory()
    base, items = chain_of(fs, 5)
    assert base is not None
    name = base.segments[gone - 1].file
    fs.unlink(part(5) / name)
    run(store(fs, 6, [record("r", [*items, 6])], base))
    assert run(load(fs, 6))[EpisodeId("r")]["session"]["items"] == [*items, 6]


def test_a_base_whose_directory_is_gone_is_written_again() -> None:
    fs = memory()
    base, items = chain_of(fs, 3)
    for entry in fs.scan(part(3)):
        fs.unlink(part(3) / entry.name)
    fs.remove_directory(part(3))
    run(store(fs, 4, [record("r", items)], base))
    assert run(load(fs, 4))[EpisodeId("r")]["session"]["items"] == items


def test_each_checkpoint_is_complete_without_the_earlier_ones() -> None:
    fs = memory()
    _, items = chain_of(fs, 8)
    for sequence in range(1, 8):
        for entry in fs.scan(part(sequence)):
            fs.unlink(part(sequence) / entry.name)
    assert run(load(fs, 8))[EpisodeId("r")]["session"]["items"] == items


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_where_links_are_not_possible_files_are_copied_and_renamed(code: int) -> None:
    def no_links(operation: str, path: PurePath) -> None:
        if operation == "link":
            raise OSError(code, os.strerror(code), str(path))

    fs = memory(before=no_links)
    _, items = chain_of(fs, 4)
    for sequence in range(1, 4):
        assert not inodes(fs, sequence) & inodes(fs, 4)
    assert run(load(fs, 4))[EpisodeId("r")]["session"]["items"] == items
    assert not any(entry.name.startswith(".") for entry in fs.scan(part(4)))


def test_files_stay_few_and_growth_linear_over_500_boundaries() -> None:
    fs = memory()
    item = {"role": "assistant", "content": "w" * 200}
    base, items, sizes, totals = None, [], [], []
    written: dict[int, int] = {}
    for sequence in range(1, 501):
        items.append({**item, "n": os.urandom(20).hex()})
        base = run(store(fs, sequence, [record("r", items), opaque("o", "s" * 50)], base)).base
        entries = fs.scan(part(sequence))
        written |= {entry.inode: entry.size_bytes for entry in entries if entry.name.startswith("segment")}
        assert sum(entry.size_bytes for entry in entries if entry.inode not in written) < 10_000
        assert len(fs.scan(part(sequence))) <= MAX_FILES
        assert len(base.segments) <= MAX_SEGMENTS
        assert len(base.chains[EpisodeId("r")].parts) <= MAX_SEGMENTS
        if sequence % 100 == 0:
            sizes.append(sum(entry.size_bytes for entry in fs.scan(part(sequence))))
            totals.append(sum(written.values()))
    assert run(load(fs, 500))[EpisodeId("r")]["session"]["items"] == items
    assert sizes[4] < sizes[0] * 5 * 1.25  # what a checkpoint takes grows with the conversation
    assert totals[4] < totals[0] * 5 * 1.5  # and so does all that was ever written
    assert totals[4] < 2 * len(str(items))


def test_dead_parts_are_dropped() -> None:
    fs = memory()
    blob = [os.urandom(2000).hex() for _ in range(40)]

    async def commits() -> None:
        base = (await store(fs, 1, [opaque(f"o-{n}", blob[n]) for n in range(40)])).base
        base = (await store(fs, 2, [opaque("o-0", blob[0])], base)).base
        assert sum(segment.fact.bytes for segment in base.segments) < 4 * len(blob[0])
        assert (await load(fs, 2))[EpisodeId("o-0")]["state"] == blob[0]

    run(commits())


def test_an_empty_export_is_a_commit() -> None:
    fs = memory()
    written = run(store(fs, 1, []))
    assert (written.episodes, run(load(fs, 1))) == ([], {})


def test_records_of_any_size_come_back() -> None:
    fs = memory()
    records = [
        opaque(f"o-{n}", "x" * size) for n, size in enumerate([0, 1, 1 << 19, 1 << 20, 3 << 20, 10, (1 << 20) - 130])
    ]
    run(store(fs, 1, records))
    assert run(load(fs, 1)) == {r.episode: r.record for r in records}
