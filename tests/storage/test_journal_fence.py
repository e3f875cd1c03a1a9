"""That a later epoch has begun is noticed without a listing for every batch."""

import os
from pathlib import Path, PurePath

import pytest

from gymckpt.errors import NotAsAsked
from gymckpt.ports import Entry
from gymckpt.storage.files import LocalFileSystem
from gymckpt.storage.journal import Journal
from tests.storage.building import INLINE, run


class _Listing(LocalFileSystem):
    """Counts listings."""

    listed = 0

    def scan(self, directory: PurePath) -> list[Entry]:
        self.listed += 1
        return super().scan(directory)


@pytest.mark.parametrize(("changed_s", "listings"), [(1_000_000.5, 1), (1_000_000.0, 20)])
def test_a_directory_that_did_not_change_is_listed_once(tmp_path: Path, changed_s: float, listings: int) -> None:
    """Except where times are whole seconds: there a change may leave no trace."""
    fs = _Listing()

    async def play() -> None:
        first = Journal(fs, INLINE, tmp_path)
        await first.open()
        os.utime(tmp_path, (changed_s, changed_s))
        fs.listed = 0
        for number in range(20):
            await first.append({"n": number})
        assert fs.listed == listings
        second = Journal(fs, INLINE, tmp_path, epoch=2)
        await second.open()
        with pytest.raises(NotAsAsked, match="epoch 2 of this run has begun"):
            await first.append({"n": 99})
        await first.close()
        await second.close()

    run(play())


def test_a_directory_that_changed_last_is_listed_again(tmp_path: Path) -> None:
    """What came after the listing may bear the same time."""
    fs = _Listing()

    async def play() -> None:
        journal = Journal(fs, INLINE, tmp_path)
        await journal.open()
        os.utime(tmp_path, (4e9 + 0.5, 4e9 + 0.5))
        fs.listed = 0
        for number in range(3):
            await journal.append({"n": number})
        assert fs.listed == 3
        await journal.close()

    run(play())
