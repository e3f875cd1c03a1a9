"""One interrupted run serves all tests of a session; each works on a copy of its own."""

import shutil
from pathlib import Path

import pytest

from tests.cli.runs import interrupted_run


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed with everything."""
    return interrupted_run(tmp_path_factory.mktemp("interrupted"))


@pytest.fixture
def run(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of it: runs can be moved."""
    return Path(shutil.copytree(interrupted, tmp_path / "moved"))
