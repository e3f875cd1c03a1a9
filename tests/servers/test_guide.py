"""The example of docs/environments.md does what the guide says."""

from pathlib import Path
from types import ModuleType
from typing import Any

from gymckpt.identity import EpisodeId
from tests.servers.resources_desk import Caller, Desk, on, value
from tests.simulation.clock import run_virtual

GUIDE = Path(__file__).parents[2] / "docs" / "environments.md"
X, Y = "ckpt-000001-0000000a", "ckpt-000002-0000000b"


def example() -> str:
    return GUIDE.read_text().partition("```python\n")[2].partition("```")[0]


def dice() -> Any:
    module = ModuleType("dice")
    exec(compile(example(), "docs/environments.md", "exec"), module.__dict__)
    return module.__dict__["Dice"]("dice")


def test_the_example_is_short() -> None:
    assert len(example().splitlines()) < 60


def test_the_example_continues_after_a_crash_where_it_was(tmp_path: Path) -> None:
    async def play(caller: Caller, rolls: int) -> None:
        for _ in range(rolls):
            await caller.use("roll", {})
            await caller.use("keep", {})

    async def main(crash: bool) -> float:
        desk = Desk(dice(), on(tmp_path))
        caller = desk.caller("r")
        await caller.seed({"seed": "a"})
        await play(caller, 2)
        if crash:
            await desk.checkpoint(X, tmp_path / X)
            desk.boot(dice())
            await desk.restore(Y, tmp_path / X, EpisodeId("r"))
            caller = caller.next_attempt()
        await play(caller, 2)
        reward: float = value(await caller.verify())["reward"]
        return reward

    assert run_virtual(main(crash=True)) == run_virtual(main(crash=False)) > 0
