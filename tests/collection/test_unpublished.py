"""When the directory of a failed checkpoint is removed at once."""

import errno
import os
from pathlib import Path

import pytest

from gymckpt.collection.unpublished import Unpublished
from gymckpt.errors import GymckptError, InvalidCheckpointState, NoSpace
from gymckpt.storage.checkpoints import CheckpointDirectory
from gymckpt.storage.durable import check_space
from gymckpt.storage.files import LocalFileSystem
from tests.simulation.clock import InlineOffload, run_virtual


def words_of_a_full_disk(path: Path) -> str:
    with pytest.raises(NoSpace) as full:
        check_space(LocalFileSystem(), path, 1 << 62)
    return full.value.detail


@pytest.mark.parametrize(
    ("failure", "kept"),
    [
        (InvalidCheckpointState("cannot write /x: the disk is slow"), ["ckpt-1"]),
        (OSError(errno.EIO, os.strerror(errno.EIO)), ["ckpt-1"]),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), []),
        (InvalidCheckpointState(f"commit on agent a was refused: cannot write /x: {os.strerror(errno.EDQUOT)}"), []),
        (None, []),
    ],
)
def test_a_failed_checkpoints_directory_stays_unless_space_ran_out(
    tmp_path: Path, failure: GymckptError | OSError | None, kept: list[str]
) -> None:
    failure = failure or InvalidCheckpointState(f"commit on agent a was refused: {words_of_a_full_disk(tmp_path)}")

    async def main() -> None:
        directory = CheckpointDirectory(LocalFileSystem(), InlineOffload(), tmp_path)
        await directory.begin("ckpt-1")
        unpublished = Unpublished(directory)
        await unpublished.failed("ckpt-1", failure)
        assert [listed.checkpoint_id for listed in await directory.listing()] == kept
        await unpublished.clear()
        assert await directory.listing() == []

    run_virtual(main())
