"""When a checkpoint is due, and what rates count."""

import pytest

from gymckpt.collection.cadence import Cadence
from gymckpt.collection.options import Every
from gymckpt.collection.progress import Rate


def test_due_by_time_by_finished_rollouts_or_by_whichever_comes_first() -> None:
    both = Cadence(Every(300.0, 200), 0.0)
    assert not both.due(299.0, 199)
    assert both.due(300.0, 0)
    assert both.due(1.0, 200)
    both.ticked(1.0, 2.0, 200)
    assert not both.due(2.0, 399)
    assert both.due(2.0, 400)
    assert both.due_in_s(2.0) == 299.0


def test_off_is_never_due() -> None:
    off = Cadence(Every(), 0.0)
    assert not off.due(1e9, 10**9)
    assert off.due_in_s(5.0) is None


def test_missed_ticks_are_counted_and_not_queued() -> None:
    cadence = Cadence(Every(10.0), 0.0)
    cadence.ticked(10.0, 45.0, 0)
    assert cadence.missed == 3
    assert not cadence.due(54.0, 0)
    assert cadence.due(55.0, 0)


def test_a_rate_counts_only_what_happened_here_since_it_was_started() -> None:
    rate = Rate(window_s=120.0)
    assert rate.per_s(5.0) == 0.0
    rate.start(100.0)
    rate.add(105.0, 10)
    assert rate.per_s(110.0) == pytest.approx(1.0)
    assert rate.per_s(1000.0) == 0.0
