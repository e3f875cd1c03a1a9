"""The ledger against a plain model of it: append, retire, delete, export, import, crash, in any order."""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gymckpt.errors import CheckpointConflict, StaleAttempt
from gymckpt.identity import EpisodeId
from gymckpt.ports import ThreadOffload
from gymckpt.roles import ledger_log
from gymckpt.roles.ledger import Ledger
from gymckpt.roles.ledger_rows import Row
from gymckpt.storage.files import LocalFileSystem

T = TypeVar("T")
ROLLOUTS = ("r-0", "r-1", "r-2")
rollouts = st.sampled_from(ROLLOUTS)
attempts = st.integers(0, 3)


class LedgerMachine(RuleBasedStateMachine):
    """What is acknowledged is there, in order, after any crash; what is fenced never comes back."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ledger-machine-"))
        self.patched = ledger_log.FILE_BYTES, ledger_log.SLACK_BYTES
        ledger_log.FILE_BYTES, ledger_log.SLACK_BYTES = 600, 900
        self.runner = asyncio.Runner()
        self.generations = itertools.count()
        self.calls = itertools.count()
        self.rows: dict[EpisodeId, list[Row]] = {}
        self.fences: dict[str, int] = {}
        self.exported: dict[str, tuple[int, list[Row]]] = {}
        self.directory = self.root / "0"
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(LocalFileSystem(), ThreadOffload(), self.directory, stripes=2, cache_bytes=700)
        self.ledger.open()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def is_fenced(self, episode: EpisodeId) -> bool:
        return episode.attempt <= self.fences.get(episode.rollout_id, -1)

    def free(self, rollout: str, up_to: int) -> None:
        for episode in [e for e in self.rows if e.rollout_id == rollout and e.attempt <= up_to]:
            del self.rows[episode]

    @rule(rollout=rollouts, attempt=attempts, count=st.integers(1, 6))
    def append(self, rollout: str, attempt: int, count: int) -> None:
        episode = EpisodeId(rollout, attempt)
        new = [{"call_id": f"call-{next(self.calls)}", "text": "x" * 20} for _ in range(count)]

        async def work() -> list[Any]:
            return await asyncio.gather(*(self.ledger.append(episode, row) for row in new), return_exceptions=True)

        results = self.run(work())
        if self.is_fenced(episode):
            assert all(isinstance(result, StaleAttempt) for result in results)
        else:
            known = self.rows.setdefault(episode, [])
            assert results == list(range(len(known), len(known) + count))
            known.extend(new)

    @rule(rollout=rollouts, attempt=attempts)
    def append_again(self, rollout: str, attempt: int) -> None:
        episode = EpisodeId(rollout, attempt)
        if known := self.rows.get(episode):
            assert self.run(self.ledger.append(episode, known[0])) == 0
            with pytest.raises(CheckpointConflict):
                self.run(self.ledger.append(episode, {**known[-1], "text": "other"}))

    @rule(rollout=rollouts, attempt=attempts)
    def retire(self, rollout: str, attempt: int) -> None:
        self.run(self.ledger.retire(EpisodeId(rollout, attempt)))
        self.free(rollout, attempt)
        self.fences[rollout] = max(attempt, self.fences.get(rollout, -1))

    @rule(rollout=rollouts, attempt=attempts)
    def delete(self, rollout: str, attempt: int) -> None:
        self.run(self.ledger.delete(EpisodeId(rollout, attempt)))
        self.free(rollout, attempt)

    @rule(rollout=rollouts, attempt=attempts)
    def export(self, rollout: str, attempt: int) -> None:
        rows = list(self.run(self.ledger.rows(EpisodeId(rollout, attempt))))
        if rows:
            self.exported[rollout] = (attempt, rows)

    @rule(rollout=rollouts, later=st.integers(1, 2))
    def restore(self, rollout: str, later: int) -> None:
        if rollout not in self.exported:
            return
        attempt, rows = self.exported[rollout]
        episode = EpisodeId(rollout, attempt + later)
        self.run(self.ledger.replace(episode, rows))
        self.free(rollout, 10**9)
        self.rows[episode] = list(rows)
        self.fences[rollout] = episode.attempt - 1

    @rule(torn=st.binary(max_size=40))
    def crash(self, torn: bytes) -> None:
        """What a killed process leaves: every byte that was acknowledged, and the beginning of a line that was not."""
        copy = self.root / str(next(self.generations) + 1)
        shutil.copytree(self.directory, copy)
        for stripe in copy.iterdir():
            if files := sorted(stripe.glob("rows-*.log")):
                with files[-1].open("ab") as file:
                    file.write(torn.replace(b"\n", b""))
        self.run(self.ledger.aclose())
        shutil.rmtree(self.directory)
        self.directory = copy
        self.open()

    @invariant()
    def everything_acknowledged_is_there_and_nothing_else(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for rollout in ROLLOUTS:
            for attempt in range(6):
                episode = EpisodeId(rollout, attempt)
                assert list(self.run(self.ledger.rows(episode))) == self.rows.get(episode, [])
                assert self.ledger.count(episode) == len(self.rows.get(episode, []))
                assert self.ledger.is_fenced(episode) == self.is_fenced(episode)

    @invariant()
    def space_stays_bounded(self) -> None:
        if hasattr(self, "ledger"):
            live = sum(len(rows) for rows in self.rows.values())
            assert self.ledger.disk_bytes <= 2 * (live + 3) * 200 + 2 * (900 + 600 + 1200)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.run(self.ledger.aclose())
            self.runner.close()
            ledger_log.FILE_BYTES, ledger_log.SLACK_BYTES = self.patched
            shutil.rmtree(self.root)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
