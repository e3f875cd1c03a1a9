"""Rules of the ledger: durable, idempotent, fenced, bounded."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gymckpt import crashpoints
from gymckpt.errors import CheckpointConflict, DamagedState, GymckptError, NotAsAsked, StaleAttempt
from gymckpt.identity import EpisodeId
from gymckpt.ports import ThreadOffload
from gymckpt.roles import ledger_log
from gymckpt.roles.ledger import Ledger
from gymckpt.roles.ledger_rows import Row
from gymckpt.storage.files import LocalFileSystem

T = TypeVar("T")
FIRST = EpisodeId("r-1", 0)
NEXT = EpisodeId("r-1", 1)


def row(call: int, **more: Any) -> Row:
    return {"call_id": f"call-{call}", "index": call, **more}


def using(directory: Path, work: Callable[[Ledger], Coroutine[Any, Any, T]], **settings: Any) -> T:
    """Open the ledger in `directory`, do `work`, close it."""

    async def run() -> T:
        ledger = Ledger(LocalFileSystem(), ThreadOffload(), directory, **settings)
        ledger.open()
        try:
            return await work(ledger)
        finally:
            await ledger.aclose()

    return asyncio.run(run())


async def append(ledger: Ledger, episode: EpisodeId, calls: range) -> None:
    await asyncio.gather(*(ledger.append(episode, row(call)) for call in calls))


def test_rows_come_back_after_a_restart_in_the_order_of_appending(tmp_path: Path) -> None:
    using(tmp_path, lambda ledger: append(ledger, FIRST, range(20)))

    async def look(ledger: Ledger) -> list[int]:
        return [found["index"] for found in await ledger.rows(FIRST)]

    assert using(tmp_path, look) == list(range(20))


def test_the_same_row_again_changes_nothing_and_another_row_of_the_call_is_a_conflict(tmp_path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        assert await asyncio.gather(*(ledger.append(FIRST, row(0)) for _ in range(3))) == [0, 0, 0]
        assert await ledger.append(FIRST, row(1)) == 1
        assert await ledger.append(FIRST, row(0)) == 0
        assert ledger.count(FIRST) == 2
        with pytest.raises(CheckpointConflict):
            await ledger.append(FIRST, row(0, output_tokens=5))

    using(tmp_path, work)


def test_a_retired_attempt_is_freed_and_refused_also_after_a_restart_while_the_next_one_goes_on(tmp_path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        await append(ledger, FIRST, range(3))
        await append(ledger, NEXT, range(2))
        await ledger.retire(FIRST)
        assert (ledger.count(FIRST), ledger.count(NEXT)) == (0, 2)

    async def again(ledger: Ledger) -> None:
        assert (ledger.count(FIRST), ledger.count(NEXT)) == (0, 2)
        with pytest.raises(StaleAttempt):
            await ledger.append(FIRST, row(9))
        await ledger.append(NEXT, row(2))

    using(tmp_path, work)
    using(tmp_path, again)


def test_a_deleted_attempt_leaves_no_fence(tmp_path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        await append(ledger, FIRST, range(3))
        await ledger.delete(FIRST)
        assert ledger.count(FIRST) == 0
        assert await ledger.append(FIRST, row(0)) == 0

    using(tmp_path, work)


def test_a_row_under_way_when_its_attempt_is_retired_does_not_come_back(tmp_path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        under_way = asyncio.gather(*(ledger.append(FIRST, row(n)) for n in range(50)), return_exceptions=True)
        await asyncio.sleep(0)
        await ledger.retire(FIRST)
        await under_way
        assert ledger.count(FIRST) == 0

    using(tmp_path, work)
    assert using(tmp_path, lambda ledger: asyncio.sleep(0, ledger.count(FIRST))) == 0


def test_a_restore_replaces_what_a_dead_execution_left_fences_too(tmp_path: Path) -> None:
    async def dead(ledger: Ledger) -> None:
        await append(ledger, NEXT, range(5))
        await ledger.retire(NEXT)
        await append(ledger, EpisodeId("r-1", 2), range(1))

    async def restore(ledger: Ledger) -> None:
        await ledger.replace(NEXT, [row(100), row(101)])
        assert [found["index"] for found in await ledger.rows(NEXT)] == [100, 101]
        assert ledger.count(EpisodeId("r-1", 2)) == 0
        assert ledger.is_fenced(FIRST)
        assert not ledger.is_fenced(NEXT)

    using(tmp_path, dead)
    using(tmp_path, restore)


def test_a_torn_tail_is_cut_and_damage_before_it_is_refused_by_name(tmp_path: Path) -> None:
    using(tmp_path, lambda ledger: append(ledger, FIRST, range(4)), stripes=1)
    (file,) = tmp_path.glob("stripe-00/rows-*.log")
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in (1, 9, len(lines[-1]) - 1):
        file.write_bytes(whole[: -len(lines[-1])] + lines[-1][:cut])
        assert using(tmp_path, lambda ledger: asyncio.sleep(0, ledger.count(FIRST)), stripes=1) == 3
    file.write_bytes(whole[: -len(lines[-1])] + b"\0" * 40 + b"\n" + b"\0" * 40 + b"\n" + b"x")
    assert using(tmp_path, lambda ledger: asyncio.sleep(0, ledger.count(FIRST)), stripes=1) == 3
    file.write_bytes(lines[0][:20] + b"X" + lines[0][21:] + b"".join(lines[1:]))
    with pytest.raises(DamagedState, match="rows-000000001"):
        using(tmp_path, lambda ledger: asyncio.sleep(0), stripes=1)


def test_a_ledger_in_use_is_not_shared(tmp_path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        with pytest.raises(NotAsAsked):
            Ledger(LocalFileSystem(), ThreadOffload(), tmp_path).open()

    using(tmp_path, work)


def test_the_cache_is_bounded_and_what_is_not_in_it_is_read_back(tmp_path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        episodes = [EpisodeId(f"r-{n}") for n in range(60)]
        await asyncio.gather(*(append(ledger, episode, range(10)) for episode in episodes))
        assert ledger.cached_bytes <= 8_000
        for episode in episodes:
            assert [found["index"] for found in await ledger.rows(episode)] == list(range(10))
            await ledger.append(episode, row(10))
            assert len(await ledger.rows(episode)) == 11
        assert ledger.cached_bytes <= 8_000

    using(tmp_path, work, cache_bytes=8_000)


def test_space_of_retired_rollouts_is_reclaimed_and_what_lives_survives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_log, "FILE_BYTES", 4_000)
    monkeypatch.setattr(ledger_log, "SLACK_BYTES", 8_000)
    lasting = EpisodeId("lasting")

    async def work(ledger: Ledger) -> None:
        for n in range(300):
            await ledger.append(lasting, row(n)) if n % 10 == 0 else None
            await append(ledger, EpisodeId(f"r-{n}"), range(8))
            await ledger.retire(EpisodeId(f"r-{n}"))
        assert ledger.disk_bytes < 2 * 300 * 120 + 8_000 + 4_000
        assert len(await ledger.rows(lasting)) == 30

    async def again(ledger: Ledger) -> None:
        assert [found["index"] for found in await ledger.rows(lasting)] == list(range(0, 300, 10))
        assert ledger.row_count == 30
        assert all(ledger.is_fenced(EpisodeId(f"r-{n}")) for n in range(300))

    using(tmp_path, work, stripes=1)
    using(tmp_path, again, stripes=1)


def test_fences_that_nobody_needs_any_more_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gymckpt.roles.ledger.FENCES_BEFORE_SWEEP", 10)

    async def work(ledger: Ledger) -> None:
        for n in range(11):
            await append(ledger, EpisodeId(f"r-{n}"), range(1))
            await ledger.retire(EpisodeId(f"r-{n}"))
        assert not any(ledger.is_fenced(EpisodeId(f"r-{n}")) for n in range(11))

    using(tmp_path, work, is_refused=lambda episode: False)


@pytest.mark.parametrize("action", ["enospc", "eio", "error"])
@pytest.mark.parametrize("point", [ledger_log.BEFORE_FSYNC, ledger_log.AFTER_FSYNC])
def test_a_row_that_could_not_be_made_durable_is_refused_and_the_next_one_is_kept(
    tmp_path: Path, action: str, point: str
) -> None:
    async def work(ledger: Ledger) -> None:
        await append(ledger, FIRST, range(3))
        crashpoints.arm(f"{point}:{action}")
        with pytest.raises((GymckptError, OSError)):
            await ledger.append(FIRST, row(3))
        crashpoints.arm(None)
        assert ledger.count(FIRST) == 3
        assert await ledger.append(FIRST, row(4)) == 3
        assert await ledger.append(FIRST, row(3)) == 4

    async def again(ledger: Ledger) -> None:
        assert [found["index"] for found in await ledger.rows(FIRST)] == [0, 1, 2, 4, 3]

    try:
        using(tmp_path, work, stripes=1)
    finally:
        crashpoints.arm(None)
    using(tmp_path, again, stripes=1)


@pytest.mark.parametrize("action", ["enospc", "eio", "error"])
def test_rows_after_a_reclaim_that_could_not_write_are_kept_where_they_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    monkeypatch.setattr(ledger_log, "FILE_BYTES", 2_000)
    monkeypatch.setattr(ledger_log, "SLACK_BYTES", 100)
    lasting = EpisodeId("lasting")
    fired: list[bool] = []

    async def work(ledger: Ledger) -> None:
        await append(ledger, lasting, range(3))
        for n in range(8):
            await append(ledger, EpisodeId(f"r-{n}"), range(10))
        for n in range(8):
            # The first passage is the retire itself; the second, if it comes, what a reclaim after it writes.
            crashpoints.arm(f"{ledger_log.BEFORE_FSYNC}:{action}:2")
            await ledger.retire(EpisodeId(f"r-{n}"))
            await ledger._logs[0]._flusher  # type: ignore[misc]
            assert crashpoints._armed is not None
            fired.append(crashpoints._armed.passages_left == 0)
            crashpoints.arm(None)
        await append(ledger, lasting, range(3, 6))
        await append(ledger, EpisodeId("other"), range(1))
        await ledger.rows(EpisodeId("other"))
        assert [found["index"] for found in await ledger.rows(lasting)] == list(range(6))

    async def again(ledger: Ledger) -> None:
        assert [found["index"] for found in await ledger.rows(lasting)] == list(range(6))

    try:
        using(tmp_path, work, stripes=1, cache_bytes=0)
    finally:
        crashpoints.arm(None)
    using(tmp_path, again, stripes=1)
    assert any(fired)
