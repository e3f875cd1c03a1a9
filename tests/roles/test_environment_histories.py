"""Any history of checkpoints, aborted checkpoints and crashes ends with the rewards of an undisturbed run.

`add` is not idempotent: an episode whose environment, agent and session were not of one instant gets another total,
and with it another reward.
"""

import asyncio
import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymckpt.identity import EpisodeId
from gymckpt.ports import Reply
from tests.roles.town import ORDER, Counter, Hold, ReplayedCounter, Town, json_of
from tests.simulation.clock import run_virtual

Deed = Literal["checkpoint", "abort", "crash"]
ROUNDS = 4
ROLLOUTS: tuple[str, ...] = ("a", "b", "c")


class Busy(Hold):
    """Everything takes a while; how long is drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = random.Random(seed)

    async def passing(self, place: Any) -> None:
        longest_s = 10.0 if place[0] == "model" else 3.0
        await asyncio.sleep(self._draw.random() * longest_s)


class Controller:
    """A collector of a few lines: checkpoints, crashes everything, restores the newest checkpoint."""

    def __init__(self, town: Town, *, flat: bool) -> None:
        self.town = town
        self.flat = flat
        self.attempts = dict.fromkeys(ROLLOUTS, 0)
        self.rewards: dict[str, float] = {}
        self.running: dict[str, asyncio.Task[Reply]] = {}
        self.published: tuple[str, set[str]] | None = None
        """The newest checkpoint and the rollouts it continues."""
        self.continued = 0

    def send(self, rollout: str) -> None:
        attempt = self.attempts[rollout]
        if self.flat:
            row = {
                "responses_create_params": {"input": "add up"},
                "wanted": ROUNDS,
                "_ng_rollout_id": rollout,
                "_ng_attempt_index": attempt,
            }
            send = functools.partial(self.town.post, "agent", "/run", row)
        else:
            send = functools.partial(self.town.run, attempt, rollout=rollout)
        self.running[rollout] = asyncio.create_task(_until_taken(send))

    def collect(self) -> None:
        """Take the replies that came: durable from now on."""
        for rollout, task in list(self.running.items()):
            if task.done():
                del self.running[rollout]
                assert task.result().status == 200, task.result().body
                found = json_of(task.result())
                assert "failure" not in found, found
                self.rewards[rollout] = found["reward"] if self.flat else found["result"]["reward"]

    async def checkpoint(self) -> None:
        checkpoint_id = self.town.next_id()
        if not await self.town.prepare(checkpoint_id, within_s=30):
            raise AssertionError("nothing here takes longer than 3 s")
        committed = await self.town.commit(checkpoint_id)
        await asyncio.sleep(0.2)
        self.collect()
        needs: dict[str, Any] = committed["agent" if self.flat else "environment"]["needs_by_episode"]
        continued = set()
        for key, needed in needs.items():
            held = needed is not None and all(key in committed[name]["episode_ids"] for _, name in needed)
            if held and EpisodeId.parse(key).rollout_id not in self.rewards:
                continued.add(EpisodeId.parse(key).rollout_id)
        self.published = (checkpoint_id, continued)
        await self.town.resume(checkpoint_id)

    async def abort(self) -> None:
        checkpoint_id = self.town.next_id()
        await self.town.prepare(checkpoint_id, within_s=0.5)
        await self.town.resume(checkpoint_id)

    async def crash(self) -> None:
        await self.town.kill(*ORDER)
        self.collect_or_void()
        for server in ORDER:
            self.town.start(server)
        unfinished = [rollout for rollout in ROLLOUTS if rollout not in self.rewards]
        if self.published is not None:
            source, continued = self.published
            named = [EpisodeId(r, self.attempts[r]) for r in unfinished if r in continued]
            await self.town.restore(source, *named)
            self.continued += len(named)
        for rollout in unfinished:
            self.attempts[rollout] += 1
            self.send(rollout)

    def collect_or_void(self) -> None:
        """Replies that came before the crash count; the others never come."""
        for rollout, task in list(self.running.items()):
            if task.done() and task.exception() is None and task.result().status == 200:
                continue
            task.cancel()
            del self.running[rollout]
        self.collect()


async def _until_taken(send: "Callable[[], asyncio.Task[Reply]]") -> Reply:
    """A refusal that began nothing is sent again."""
    while True:
        reply = await send()
        if reply.status != 409 or b"admission_closed" not in reply.body:
            return reply
        await asyncio.sleep(1)


async def _history(root: Path, seed: int, deeds: list[tuple[float, Deed]], *, flat: bool, replayed: bool) -> Controller:
    town = Town(root, rounds=ROUNDS, counter=ReplayedCounter if replayed else Counter, hold=Busy(seed))
    controller = Controller(town, flat=flat)
    for rollout in ROLLOUTS:
        controller.send(rollout)
    for after_s, deed in deeds:
        await asyncio.sleep(after_s)
        controller.collect()
        await getattr(controller, deed)()
    while controller.running:
        await asyncio.wait(controller.running.values())
        controller.collect()
    return controller


DEEDS = st.lists(
    st.tuples(st.floats(0, 20), st.sampled_from(["checkpoint", "checkpoint", "abort", "crash"])), max_size=10
)


def _ends_as_undisturbed(flat: bool, seed: int, deeds: list[tuple[float, Deed]], replayed: bool) -> None:
    with tempfile.TemporaryDirectory() as root:
        controller = run_virtual(_history(Path(root), seed, deeds, flat=flat, replayed=replayed))
    assert controller.rewards == dict.fromkeys(ROLLOUTS, 1.0)


HISTORY = {"flat": st.booleans(), "seed": st.integers(0, 2**32), "deeds": DEEDS, "replayed": st.booleans()}


@settings(max_examples=12, deadline=None)
@given(**HISTORY)
def test_any_history_ends_with_the_rewards_of_an_undisturbed_run(**history: Any) -> None:
    _ends_as_undisturbed(**history)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=500, deadline=None)
@given(**HISTORY)
def test_many_histories_end_with_the_rewards_of_an_undisturbed_run(**history: Any) -> None:
    _ends_as_undisturbed(**history)


def test_such_histories_do_continue_episodes(tmp_path: Path) -> None:
    deeds: list[tuple[float, Deed]] = [(10, "checkpoint"), (4, "crash"), (10, "checkpoint"), (3, "crash")]
    controller = run_virtual(_history(tmp_path, 1, deeds, flat=False, replayed=False))
    assert controller.continued >= 4
    assert controller.rewards == dict.fromkeys(ROLLOUTS, 1.0)
