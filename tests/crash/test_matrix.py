"""Every crash point x {kill, error, ENOSPC, EIO, hang past the deadline} x {run, resume, resume of the resume}.

Each cell must really come to its point, or be listed below as one that this scenario does not reach.
"""

import os
from collections.abc import Iterator

import pytest

from tests.crash.matrix import ACTIONS, PHASES, SEED, Cell, Phase, play, points

ONLY_WHEN_A_RUN_BEGINS = "collector.create."
ONLY_WHEN_ONE_IS_RESTORED = ("collector.restore.", "restore.")
NEVER_HERE = {
    "commit.prefixes.before_link": "no simulated worker serves generation cuts: see tests/servers/test_model_cuts.py",
    "ledger.reclaim.before_unlink": "the ledger stays far below the size of one file: see tests/roles/test_ledger.py",
}
STRIDE = 60
"""The default suite plays one cell in so many; the slow one plays all."""


def reachable(point: str, phase: Phase) -> bool:
    """Whether the scenario comes to this point once it is armed."""
    if point in NEVER_HERE:
        return False
    if point.startswith(ONLY_WHEN_A_RUN_BEGINS):
        return phase == "run"
    if point.startswith(ONLY_WHEN_ONE_IS_RESTORED):
        return phase != "run"
    return True


def cells() -> Iterator[Cell]:
    """The whole matrix, so ordered that neighbours differ in all three."""
    for number, point in enumerate(points()):
        for turn in range(len(ACTIONS) * len(PHASES)):
            yield Cell(
                point,
                ACTIONS[(number + turn) % len(ACTIONS)],
                PHASES[(number + turn // len(ACTIONS)) % len(PHASES)],
            )


CELLS = list(cells())
CHOSEN = [cell for cell in CELLS if reachable(cell.point, cell.phase)][::STRIDE]


def prove(cell: Cell) -> None:
    came = play(cell, seed=int(os.environ.get("GYMCKPT_SEED", str(SEED))))
    assert (came.fired_in is not None) == reachable(cell.point, cell.phase), came


def test_the_matrix_is_whole() -> None:
    assert len(set(CELLS)) == len(CELLS) == len(points()) * len(ACTIONS) * len(PHASES)
    assert set(NEVER_HERE) <= set(points())


@pytest.mark.parametrize("cell", CHOSEN, ids=str)
def test_a_deployment_recovers_from(cell: Cell) -> None:
    prove(cell)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_deployment_recovers_from_every(cell: Cell) -> None:
    prove(cell)
