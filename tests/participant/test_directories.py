"""Directories that a commit may name."""

from pathlib import Path

import pytest

from tests.participant.stand import A, B, Stand, X, Y, refused, started, virtually, written


@pytest.mark.parametrize("directory", ["relative/path", "{root}/../elsewhere", "/elsewhere", "{root}", "{root}/x\0y"])
def test_a_directory_must_be_absolute_without_dots_and_below_the_root(tmp_path: Path, directory: str) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path / "root")
        await stand.prepare(X)
        await refused("invalid_checkpoint_state", stand.commit(X, directory=directory.format(root=tmp_path / "root")))
        assert stand.participant.phase == "prepared"
        assert stand.manifests() == []

    virtually(rule)


@pytest.mark.parametrize("place", [".", "gym", "gym/environment", "gym/environment/counter"])
def test_no_symlink_leads_out_of_the_root(tmp_path: Path, place: str) -> None:
    async def rule() -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        stand = Stand(tmp_path / "root")
        link = Path(stand.directory(X)) / place
        link.parent.mkdir(parents=True)
        link.symlink_to(outside)
        await started(stand, A)
        await stand.prepare(X)
        await refused("invalid_checkpoint_state", stand.commit(X))
        assert list(outside.iterdir()) == []

    virtually(rule)


def test_a_directory_that_another_commit_has_filled_is_refused(tmp_path: Path) -> None:
    async def rule() -> None:
        first = Stand(tmp_path)
        await started(first, A)
        await first.checkpoint(X)
        stand = Stand(tmp_path)
        await started(stand, B)
        await stand.prepare(Y)
        await refused("invalid_checkpoint_state", stand.commit(Y, directory=stand.directory(X)))
        assert await written(first, X) == {"a": [0, 1]}

    virtually(rule)
