"""Exhaustive tests take minutes, more on a busy machine: the limit of the default suite is not for them."""

from pathlib import Path

import pytest

EXHAUSTIVE_S = 1800


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        here = item.path.is_relative_to(Path(__file__).parent)
        if here and item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(EXHAUSTIVE_S))
