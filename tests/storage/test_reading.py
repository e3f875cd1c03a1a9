"""Records are read ahead of their reader, in order, and never before what they rest on was checked."""

from contextlib import aclosing
from pathlib import PurePath

import pytest

from gymckpt.errors import DamagedState
from tests.simulation.files import MemoryFileSystem
from tests.storage.building import RUN, opaque, reader, run, store
from tests.storage.test_damage import LINE, Hostile, row


class CountingFileSystem(MemoryFileSystem):
    """Remembers how much each read was for."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def read(self, path: PurePath, offset: int = 0, length: int = -1) -> bytes:
        self.lengths.append(length)
        return super().read(path, offset, length)


@pytest.mark.parametrize(("state_bytes", "read_frames"), [(1 << 20, 4), (5 << 20, 1)])
def test_small_records_are_read_ahead_and_large_ones_one_at_a_time(state_bytes: int, read_frames: int) -> None:
    async def read() -> None:
        fs = CountingFileSystem()
        fs.make_root(RUN)
        await store(fs, 1, (opaque(f"r{number}", "x" * state_bytes) for number in range(7)))
        found = reader(fs, 1)
        await found.open()
        async with aclosing(found.records()) as records:
            fs.lengths.clear()
            await anext(records)
        digest, *frames = fs.lengths
        assert digest > sum(frames)
        assert len(frames) == read_frames

    run(read())


@pytest.mark.parametrize("scope", [None, {"r": 0, "s": 0}])
def test_no_record_is_given_before_the_whole_index_was_checked(scope: dict[str, int] | None) -> None:
    async def read() -> None:
        hostile = Hostile()
        hostile.build([LINE], [row(), row(attempt=1)], manifest={"record_count": 3})
        found = reader(hostile.fs, 1)
        await found.open()
        async for stored in found.records(scope):
            raise AssertionError(stored)

    with pytest.raises(DamagedState, match="2 episodes, the manifest says 3"):
        run(read())
