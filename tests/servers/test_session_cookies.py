"""A session's cookie stands in checkpoints, so it must count whatever the clock says later."""

import itertools
from pathlib import Path

import pytest
from itsdangerous import TimestampSigner

from tests.roles.town import Town, finished
from tests.simulation.clock import run_virtual

YEAR_S = 365 * 86_400


def test_an_episode_is_finished_although_years_pass_and_the_clock_is_set_back_between_any_two_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.cycle([40 * YEAR_S, 55 * YEAR_S, 50 * YEAR_S])
    monkeypatch.setattr(TimestampSigner, "get_timestamp", lambda signer: next(times))

    async def main() -> None:
        reply = await finished(Town(tmp_path, rounds=3).run())
        assert "failure" not in reply, reply

    run_virtual(main())
