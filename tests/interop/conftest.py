"""The servers of these tests run code of the tests in processes of their own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _tests_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
