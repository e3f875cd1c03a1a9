"""A small, true role: a server on which every episode is a counter that can be bumped."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gymckpt.errors import AdmissionClosed, InvalidCheckpointState, StaleAttempt
from gymckpt.identity import EpisodeId, Kind
from gymckpt.participant.admission import Gate
from gymckpt.participant.marks import Marks
from gymckpt.participant.role import Installable, RoleReport
from gymckpt.storage.records import Boundary, ExportedRecord, StoredRecord


class CounterRole:
    """Episodes are started, bumped, and ended. A bump waits at a closed gate; a restored episode is claimed by a start.

    An episode started as a restart cannot be captured.
    """

    def __init__(self, kind: Kind = "environment", instance: str = "counter") -> None:
        self._kind: Kind = kind
        self._instance = instance
        self._marks = Marks()
        self.gate = Gate()
        self.counts: dict[EpisodeId, list[int]] = {}
        self.restored: dict[EpisodeId, list[int]] = {}
        self.restarts: set[EpisodeId] = set()
        self.tasks: dict[EpisodeId, set[asyncio.Task[Any]]] = {}
        self.suspended: set[EpisodeId] = set()
        self.exports = 0
        self.exported = asyncio.Event()
        self._cancelled: set[asyncio.Task[Any]] = set()
        self._frozen: frozenset[EpisodeId] | None = None

    @property
    def kind(self) -> Kind:
        return self._kind

    @property
    def instance(self) -> str:
        return self._instance

    @property
    def marks(self) -> Marks:
        return self._marks

    # Its own plane

    def start(self, episode: EpisodeId, *, restart: bool = False) -> None:
        self._marks.check(episode)
        self.gate.check_open("no new episode now", AdmissionClosed)
        if episode in self.counts:
            raise StaleAttempt(f"{episode} runs already")
        self.counts[episode] = self.restored.pop(episode, [])
        if restart:
            self.restarts.add(episode)

    async def bump(self, episode: EpisodeId, *, takes_s: float = 0.0) -> int:
        """One more; in flight, and so a blocker, for `takes_s`."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.setdefault(episode, set()).add(task)
        try:
            async with self.gate.admit(episode.capture_key, lambda: self._check(episode)):
                await asyncio.sleep(takes_s)
                self._check(episode)
                self.counts[episode].append(len(self.counts[episode]))
                return len(self.counts[episode])
        finally:
            self.tasks.get(episode, set()).discard(task)

    def end(self, episode: EpisodeId) -> None:
        self.counts.pop(episode, None)
        self.restarts.discard(episode)
        self.gate.changed.notify()

    def _check(self, episode: EpisodeId) -> None:
        self._marks.check(episode)
        if episode not in self.counts:
            raise StaleAttempt(f"{episode} does not live here")

    # What the control plane asks

    def close(self) -> None:
        if self._frozen is None:
            self._frozen = frozenset(self.restarts)
        self.gate.close()

    def open(self) -> None:
        self._frozen = None
        self.gate.open()

    def report(self) -> RoleReport:
        self.gate.changed.looked()
        restarts = {episode.capture_key for episode in (self.restarts if self._frozen is None else self._frozen)}
        blockers = self.gate.names - restarts
        return RoleReport(blockers, {"episodes": len(self.counts), "waiting": self.gate.waiting}, restarts)

    async def changed(self) -> None:
        await self.gate.changed.wait()

    async def export(self, scope: Collection[EpisodeId] | None) -> AsyncIterator[ExportedRecord]:
        self.exports += 1
        self.exported.set()
        left_out = self.restarts if self._frozen is None else self._frozen
        for episode, history in [*self.counts.items(), *self.restored.items()]:
            if episode not in left_out and (scope is None or episode in scope):
                yield self.record(episode, history)
                await asyncio.sleep(0)

    def record(self, episode: EpisodeId, history: list[int]) -> ExportedRecord:
        return ExportedRecord(
            episode,
            {"episode_id": {"rollout_id": episode.rollout_id, "attempt": episode.attempt}, "history": history},
            Boundary("bump", len(history), 1.0) if history else None,
            needs=(("resources", "tools"),),
            lists={"/history": len(history)},
        )

    async def validate(self, records: AsyncIterator[StoredRecord]) -> Installable:
        taken: dict[str, list[int]] = {}
        async for stored in records:
            history = stored.record.get("history")
            if not isinstance(history, list) or 13 in history:
                raise InvalidCheckpointState(f"{stored.episode} has a history that no counter ever had")
            taken[stored.episode.rollout_id] = list(history)
        return Installable([EpisodeId(rollout_id) for rollout_id in taken], taken)

    async def install(self, installable: Installable, attempts: Mapping[str, int]) -> None:
        for rollout_id, history in installable.prepared.items():
            self.restored[EpisodeId(rollout_id, attempts[rollout_id])] = history

    async def drop_restored(self, keep: Collection[EpisodeId]) -> None:
        for episode in set(self.restored) - set(keep):
            del self.restored[episode]

    async def suspend_compute(self, episodes: Collection[EpisodeId]) -> None:
        self.suspended |= set(episodes)

    async def wake_compute(self, episodes: Collection[EpisodeId]) -> None:
        self.suspended -= set(episodes)

    async def retire(self, episode: EpisodeId) -> None:
        covered = [
            other
            for other in {*self.counts, *self.restored, *self.tasks}
            if other.rollout_id == episode.rollout_id and other.attempt <= episode.attempt
        ]
        for other in covered:
            tasks = set(self.tasks.get(other, ()))
            for task in tasks - self._cancelled:
                self._cancelled.add(task)
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
                self._cancelled -= tasks
            self.tasks.pop(other, None)
            self.restored.pop(other, None)
            self.end(other)

    def live(self) -> Collection[str]:
        return [episode.capture_key for episode in (*self.counts, *self.restored)]

    def status(self) -> Mapping[str, Any]:
        return {"restored_pending": len(self.restored)} if self._kind == "environment" else {}

    def commit_fields(self, exported: Sequence[EpisodeId]) -> Mapping[str, Any]:
        if self._kind != "model":
            return {}
        by_episode = {episode.capture_key: [f"stage-{episode}"] for episode in exported}
        staged = sorted(key for keys in by_episode.values() for key in keys)
        return {"staging_keys": staged, "staging_keys_by_episode": by_episode}


class HeldInstallRole(CounterRole):
    """Its installs take until `let_go`."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = asyncio.Event()
        self.installing = asyncio.Event()

    async def install(self, installable: Installable, attempts: Mapping[str, int]) -> None:
        self.installing.set()
        await self.let_go.wait()
        await super().install(installable, attempts)


class StubbornRole(CounterRole):
    """Its exports and installs do not end before `let_go`, and swallow every cancellation."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = asyncio.Event()
        self.began = asyncio.Event()

    async def _hold(self) -> None:
        self.began.set()
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                continue

    async def export(self, scope: Collection[EpisodeId] | None) -> AsyncIterator[ExportedRecord]:
        await self._hold()
        async for record in super().export(scope):
            yield record

    async def install(self, installable: Installable, attempts: Mapping[str, int]) -> None:
        await self._hold()
        await super().install(installable, attempts)


class BrokenInstallRole(CounterRole):
    """Its installs fail half-way, by a bug."""

    async def install(self, installable: Installable, attempts: Mapping[str, int]) -> None:
        await super().install(installable, attempts)
        raise RuntimeError("bug")


class HeldHooksRole(CounterRole):
    """Suspending, waking and dropping fail or take for ever, as asked."""

    fails = True

    async def suspend_compute(self, episodes: Collection[EpisodeId]) -> None:
        await self._misbehave()

    async def wake_compute(self, episodes: Collection[EpisodeId]) -> None:
        await self._misbehave()

    async def _misbehave(self) -> None:
        if self.fails:
            raise RuntimeError("no such compute")
        await asyncio.sleep(10**6)


@asynccontextmanager
async def busy(role: CounterRole, episode: EpisodeId, takes_s: float) -> AsyncIterator[asyncio.Task[int]]:
    """A bump of `takes_s` that has begun."""
    task = asyncio.create_task(role.bump(episode, takes_s=takes_s))
    await asyncio.sleep(0)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
