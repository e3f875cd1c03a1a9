"""Any sequence of commits, failed commits, prunes, merges, restores and crashes reads back what a dictionary says."""

import errno
import os
import random
from pathlib import PurePath
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gymckpt.errors import GymckptError
from gymckpt.identity import EpisodeId
from gymckpt.storage.base import Base
from gymckpt.storage.records import ExportedRecord, Record
from tests.storage.building import RUN_ID, checkpoint_id, directory, load, memory, publish, reader, run

ROLLOUTS = st.sampled_from(["a", "b", "c", "d"])
ITEMS: st.SearchStrategy[Any] = st.sampled_from(
    [1, "x", None, [], {"k": [1.5]}, 2**70, float("inf"), "\ud800", "y" * 3000]
)


class Live:
    """One episode as a role would hold it."""

    def __init__(self, attempt: int, items: list[Any], head: Any) -> None:
        self.attempt = attempt
        self.items = items
        self.head = head
        self.revision = 0

    def record(self, rollout: str) -> Record:
        return {"id": [rollout, self.attempt], "deep": {"z": self.head, "items": list(self.items)}, "a": self.head}


class StorageMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fs = memory()
        self.live: dict[str, Live] = {}
        self.base: Base | None = None
        self.sequence = 0
        self.published: dict[int, dict[EpisodeId, Record]] = {}
        # Published as far as can be seen, though publishing them failed: they count, but a power cut may take them.
        self.unreported: set[int] = set()
        self.rng = random.Random(1)

    @rule(rollout=ROLLOUTS, head=ITEMS)
    def begin_again(self, rollout: str, head: Any) -> None:
        attempt = self.live[rollout].attempt + 1 if rollout in self.live else 0
        self.live[rollout] = Live(attempt, [], head)

    @rule(rollout=ROLLOUTS, items=st.lists(ITEMS, max_size=4))
    def grow(self, rollout: str, items: list[Any]) -> None:
        if rollout in self.live:
            self.live[rollout].items += items
            self.live[rollout].revision += 1

    @rule(rollout=ROLLOUTS, head=ITEMS)
    def change(self, rollout: str, head: Any) -> None:
        if rollout in self.live:
            self.live[rollout].head = head
            self.live[rollout].revision += 1

    @rule(rollout=ROLLOUTS)
    def end(self, rollout: str) -> None:
        self.live.pop(rollout, None)

    def exports(self) -> list[ExportedRecord]:
        found = []
        for number, (rollout, live) in enumerate(self.live.items()):
            lists = {} if rollout == "d" else {"/deep/items": len(live.items)}
            revision = None if number % 2 else live.revision
            record = {"id": [rollout, live.attempt], "deep": {"z": live.head, "items": live.items}, "a": live.head}
            found.append(ExportedRecord(EpisodeId(rollout, live.attempt), record, None, 0, None, revision, lists))
        return found

    def model(self) -> dict[EpisodeId, Record]:
        return {EpisodeId(rollout, live.attempt): live.record(rollout) for rollout, live in self.live.items()}

    @rule(times=st.integers(1, 20))
    def commit(self, times: int) -> None:
        for _ in range(times):
            self.sequence += 1
            exports = self.exports()
            _, written = run(publish(self.fs, self.sequence, exports, self.base))
            self.base = written.base
            self.published[self.sequence] = self.model()
            if times > 1 and self.live:
                self.grow(self.rng.choice(list(self.live)), [self.sequence])

    @rule(step=st.integers(0, 40), code=st.sampled_from([errno.ENOSPC, errno.EIO, errno.EROFS]))
    def fail_to_commit(self, step: int, code: int) -> None:
        self.sequence += 1
        begun = len(self.fs.operations)

        def before(operation: str, path: PurePath) -> None:
            if len(self.fs.operations) >= begun + step:
                raise OSError(code, os.strerror(code), str(path))

        self.fs.before = before
        try:
            _, written = run(publish(self.fs, self.sequence, self.exports(), self.base))
        except GymckptError:
            self.fs.before = None
            found, _ = run(directory(self.fs).newest_valid(RUN_ID))
            if found is None or found.collection.sequence != self.sequence:
                return
            self.unreported.add(self.sequence)
        else:
            self.fs.before = None
            self.base = written.base
        self.published[self.sequence] = self.model()

    @rule(keep=st.integers(1, 3))
    def prune(self, keep: int) -> None:
        before = len(self.published)
        for name in run(directory(self.fs).prune(keep)):
            self.published = {n: model for n, model in self.published.items() if checkpoint_id(n) != name}
        if len(self.published) < before:
            self.unreported.clear()  # what is kept in their place must last
        assert len(self.published) <= keep

    @rule(power=st.booleans(), seed=st.integers(0, 1000))
    def crash_and_restore(self, power: bool, seed: int) -> None:
        self.fs = self.fs.crashed(random.Random(seed)) if power else self.fs.restarted()
        self.base, self.live = None, {}
        found, _ = run(directory(self.fs).newest_valid(RUN_ID))
        there = {
            listed.published.collection.sequence for listed in run(directory(self.fs).listing()) if listed.published
        }
        for sequence in self.unreported - there if power else ():
            del self.published[sequence]
        self.unreported.clear()
        assert (found is not None) == bool(self.published)
        if found is None:
            return
        sequence = found.collection.sequence
        assert sequence == max(self.published)
        attempts = {}
        for episode, record in run(load(self.fs, sequence)).items():
            attempts[episode.rollout_id] = episode.attempt + 3
            self.live[episode.rollout_id] = Live(episode.attempt + 3, record["deep"]["items"], record["a"])
        opened = reader(self.fs, sequence)
        run(opened.open())
        self.base = opened.base(attempts)

    @invariant()
    def every_published_checkpoint_reads_back(self) -> None:
        for sequence in sorted(self.published)[-2:]:
            assert repr(run(load(self.fs, sequence))) == repr(self.published[sequence])


StorageMachine.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestStorage = StorageMachine.TestCase
