"""Where an episode counts whose verdict came to a whole cohort at once."""

from pathlib import Path
from typing import ClassVar

import pytest

from gymckpt.wire.control import ResourcesMode
from tests.roles.town import ReplayedCounter, Town, finished, soon
from tests.simulation.clock import run_virtual


class CohortCounter(ReplayedCounter):
    checkpoint_mode: ClassVar[ResourcesMode] = "stateless"
    compares_cohorts: ClassVar[bool] = True


@pytest.mark.parametrize(("counter", "step"), [(CohortCounter, "verify"), (ReplayedCounter, "return")])
def test_a_member_with_its_verdict_still_stands_before_verify_because_its_siblings_need_it_there(
    tmp_path: Path, counter: type[ReplayedCounter], step: str
) -> None:
    async def main() -> None:
        town = Town(tmp_path, counter=counter)
        town.hold.at("verify")
        running = town.run()
        await town.hold.reached["verify"].wait()
        role = town.roles["environment"]
        role.close()
        town.hold.let_go("verify")
        await soon()
        # The next checkpoint begins before the episode could take a step.
        role.open()
        role.close()
        assert [record.boundary.step async for record in role.export(None)] == [step]
        role.open()
        assert (await finished(running))["result"]["reward"] == 1.0

    run_virtual(main())
