"""Whatever a controller does, in whatever order, while storage stalls and fails: a participant keeps its rules."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Collection, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gymckpt.errors import ControlError
from gymckpt.identity import EpisodeId
from gymckpt.storage.reader import ParticipantReader
from gymckpt.storage.records import ExportedRecord
from gymckpt.wire.control import CommitReply
from tests.participant.held import FailingFileSystem, HeldOffload
from tests.participant.roles import HeldInstallRole
from tests.participant.stand import GRACE_S, Stand
from tests.simulation.clock import InlineOffload, VirtualLoop

T = TypeVar("T")

ROLLOUTS = st.sampled_from(["a", "b", "c"])
SECONDS = st.sampled_from([1.0, 10.0, 40.0])
WHICH = st.sampled_from(["active", "active", "active", "active", "new", "old"])
"""`active` where something is, else a new id."""


def named_by(episodes: list[EpisodeId]) -> dict[str, EpisodeId]:
    return {episode.rollout_id: episode for episode in episodes}


class WatchedRole(HeldInstallRole):
    """Remembers what its last complete export held; whether one is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go.set()
        self.exporting = 0
        self.complete: list[dict[str, list[int]]] = []

    async def export(self, scope: Collection[EpisodeId] | None) -> AsyncIterator[ExportedRecord]:
        held: dict[str, list[int]] = {}
        self.exporting += 1
        try:
            async for record in super().export(scope):
                held[record.episode.capture_key] = list(record.record["history"])
                yield record
            self.complete.append(held)
        finally:
            self.exporting -= 1


class OneParticipant(RuleBasedStateMachine):
    """A controller that makes every mistake there is, and a disk that stalls and fails."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="gymckpt-machine-"))
        self.loop = VirtualLoop()
        self.role, self.fs, self.offload = WatchedRole(), FailingFileSystem(), HeldOffload()
        self.stand = Stand(self.root, self.role, fs=self.fs, offload=self.offload)
        self.participant = self.stand.participant
        self.used: list[str] = []
        self.attempts = dict.fromkeys("abc", -1)
        self.retired: set[EpisodeId] = set()
        self.frozen: dict[str, bytes | None] = {}
        """What a resumed checkpoint's manifest was at its resume."""
        self.first_export: dict[str, dict[str, list[int]]] = {}
        self.stored: dict[str, dict[str, list[int]]] = {}
        self.background: list[asyncio.Task[int]] = []

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.offload.let_go()
        self.role.let_go.set()
        self.run(self.finish())
        self.loop.close()
        shutil.rmtree(self.root)

    async def finish(self) -> None:
        for task in self.background:
            task.cancel()
        await asyncio.gather(*self.background, return_exceptions=True)
        await asyncio.sleep(1)
        await self.participant.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def call(self, operation: Coroutine[Any, Any, T]) -> T | ControlError:
        """The reply, or the refusal; never later than the deadline by more than a moment."""
        try:
            return self.run(asyncio.wait_for(operation, 45))
        except ControlError as error:
            return error

    def checkpoint_id(self, which: str) -> str:
        active = self.participant._state.active
        if which == "active" and active is not None:
            return active.checkpoint_id
        if which == "old" and self.used:
            return self.used[0]
        self.used.append(f"ckpt-{len(self.used):06}-00000000")
        return self.used[-1]

    def manifest(self, checkpoint_id: str) -> bytes | None:
        path = self.root / checkpoint_id / "gym" / self.role.kind / self.role.instance / "manifest.json"
        return path.read_bytes() if path.exists() else None

    # What the server itself does

    @rule(rollout=ROLLOUTS, restart=st.booleans())
    @precondition(lambda self: self.role.gate.is_open)
    def start(self, rollout: str, restart: bool) -> None:
        waiting = [episode for episode in self.role.restored if episode.rollout_id == rollout]
        episode = max(waiting) if waiting else EpisodeId(rollout, self.attempts[rollout] + 1)
        if not self.role.marks.refuses(episode):
            self.role.start(episode, restart=restart)
            self.attempts[rollout] = max(self.attempts[rollout], episode.attempt)

    @rule(takes_s=st.sampled_from([0.0, 3.0, 60.0]), data=st.data())
    @precondition(lambda self: self.role.counts)
    def bump(self, takes_s: float, data: st.DataObject) -> None:
        episode = data.draw(st.sampled_from(sorted(self.role.counts)))
        self.background.append(self.loop.create_task(self.role.bump(episode, takes_s=takes_s)))

    @rule(data=st.data())
    @precondition(lambda self: self.role.counts and self.role.gate.is_open)
    def end(self, data: st.DataObject) -> None:
        self.role.end(data.draw(st.sampled_from(sorted(self.role.counts))))

    @rule(data=st.data())
    @precondition(lambda self: self.role.counts and not self.role.exporting)
    def step_that_was_let_through_ends(self, data: st.DataObject) -> None:
        history = self.role.counts[data.draw(st.sampled_from(sorted(self.role.counts)))]
        history.append(len(history))

    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    # What its disk does

    @rule(fails=st.booleans())
    def links_fail(self, fails: bool) -> None:
        self.fs.failing = fails

    @rule(holds=st.booleans())
    def threads_stall(self, holds: bool) -> None:
        if holds:
            self.offload.hold()
        else:
            self.offload.let_go()

    @rule(holds=st.booleans())
    def installs_stall(self, holds: bool) -> None:
        if holds:
            self.role.let_go.clear()
        else:
            self.role.let_go.set()

    # What controllers do

    @rule(which=WHICH, seconds=SECONDS)
    def prepare(self, which: str, seconds: float) -> None:
        checkpoint_id = self.checkpoint_id(which)
        reply = self.call_held(self.stand.prepare(checkpoint_id, seconds))
        if checkpoint_id in self.frozen:
            assert isinstance(reply, ControlError | None)

    @rule(which=WHICH, seconds=SECONDS, everything=st.booleans(), stop=st.booleans(), data=st.data())
    def commit(self, which: str, seconds: float, everything: bool, stop: bool, data: st.DataObject) -> None:
        checkpoint_id = self.checkpoint_id(which)
        mine = sorted(set(self.role.counts) | set(self.role.restored))
        some = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
        scope = None if everything else [episode for episode in some if episode not in self.role.restarts]
        done = len(self.role.complete)
        reply = self.call(self.stand.commit(checkpoint_id, scope, seconds=seconds, stop=stop))
        if len(self.role.complete) > done and checkpoint_id not in self.first_export:
            self.first_export[checkpoint_id] = self.role.complete[done]
        if isinstance(reply, CommitReply):
            self.check_commit(checkpoint_id, scope, reply)

    def check_commit(self, checkpoint_id: str, scope: list[EpisodeId] | None, reply: CommitReply) -> None:
        assert self.participant.phase == "committed"
        named = {EpisodeId.parse(key) for key in reply.episode_ids}
        assert scope is None or named <= set(scope)
        assert not any(self.role.marks.refuses(episode) for episode in named)
        assert not named & (self.role._frozen or set())
        read = self.run(self.read(checkpoint_id))
        assert set(read) == set(reply.episode_ids)
        first = self.first_export.setdefault(checkpoint_id, self.role.complete[-1])
        assert read == {key: history for key, history in first.items() if key in read}
        self.stored[checkpoint_id] = read

    async def read(self, checkpoint_id: str) -> dict[str, list[int]]:
        reader = ParticipantReader(
            self.fs,
            InlineOffload(),
            self.root / checkpoint_id / "gym" / self.role.kind / self.role.instance,
            kind=self.role.kind,
            instance=self.role.instance,
        )
        assert await reader.verify() == []
        await reader.open()
        return {stored.episode.capture_key: stored.record["history"] async for stored in reader.records(None)}

    @rule(which=WHICH, seconds=SECONDS)
    def renew(self, which: str, seconds: float) -> None:
        self.call(self.stand.renew(self.checkpoint_id(which), seconds))

    @rule(which=WHICH, seconds=SECONDS)
    def resume(self, which: str, seconds: float) -> None:
        checkpoint_id = self.checkpoint_id(which)
        reply = self.call_held(self.stand.resume(checkpoint_id, seconds))
        if reply is None or isinstance(reply, ControlError):
            return
        self.frozen.setdefault(checkpoint_id, self.manifest(checkpoint_id))
        active = self.participant._state.active
        assert active is None or active.checkpoint_id != checkpoint_id

    @rule(which=WHICH, data=st.data(), seconds=SECONDS)
    @precondition(lambda self: self.stored)
    def restore(self, which: str, data: st.DataObject, seconds: float) -> None:
        source = data.draw(st.sampled_from(sorted(self.stored)))
        named = [EpisodeId(rollout, attempt) for rollout, attempt in self.attempts.items() if attempt >= 0]
        before = dict(self.role.restored)
        reply = self.call(self.stand.restore(self.checkpoint_id(which), source, named, seconds=seconds))
        if isinstance(reply, ControlError):
            if self.role.let_go.is_set():
                assert {k: v for k, v in self.role.restored.items() if k not in before} == {}
            return
        for key in reply.restored:
            episode = EpisodeId.parse(key)
            self.attempts[episode.rollout_id] = max(self.attempts[episode.rollout_id], episode.attempt)
            assert all(self.role.marks.refuses(EpisodeId(episode.rollout_id, n)) for n in range(episode.attempt))

    @rule(which=WHICH, rollout=ROLLOUTS, seconds=SECONDS)
    def retire(self, which: str, rollout: str, seconds: float) -> None:
        if self.attempts[rollout] < 0:
            return
        episode = EpisodeId(rollout, self.attempts[rollout])
        reply = self.call_held(self.stand.retire(self.checkpoint_id(which), episode, seconds=seconds))
        if reply is None or isinstance(reply, ControlError):
            return
        self.retired |= {EpisodeId(rollout, attempt) for attempt in range(episode.attempt + 1)}
        assert not set(self.role.counts) & self.retired
        assert not set(self.role.restored) & self.retired

    @rule(which=WHICH, rollout=ROLLOUTS)
    def forget(self, which: str, rollout: str) -> None:
        reply = self.call_held(self.stand.forget(self.checkpoint_id(which), rollout))
        if isinstance(reply, ControlError):
            return
        if reply is not None and reply.forgotten:
            assert all(episode.rollout_id != rollout for episode in (*self.role.counts, *self.role.restored))
        if not self.role.marks.holds(rollout):
            assert reply is None or reply.forgotten or not any(e.rollout_id == rollout for e in self.retired)
            self.retired = {episode for episode in self.retired if episode.rollout_id != rollout}

    # The way things are meant to go

    @rule(stop=st.booleans(), resumed=st.booleans())
    def take_a_checkpoint(self, stop: bool, resumed: bool) -> None:
        self.heal()
        if self.participant._state.active is not None:
            self.resume("active", 40.0)
        self.run(asyncio.sleep(61))
        checkpoint_id = self.checkpoint_id("new")
        done = len(self.role.complete)
        assert self.run(self.stand.prepare(checkpoint_id)).phase == "prepared"
        reply = self.run(self.stand.commit(checkpoint_id, None, stop=stop))
        assert len(self.role.complete) == done + 1
        self.check_commit(checkpoint_id, None, reply)
        if resumed:
            self.resume("active", 40.0)
            assert self.role.suspended == set()

    @rule(data=st.data())
    @precondition(lambda self: self.stored)
    def recover(self, data: st.DataObject) -> None:
        self.heal()
        if self.participant._state.active is not None:
            self.resume("active", 40.0)
        source = data.draw(st.sampled_from(sorted(self.stored)))
        named = [EpisodeId(rollout, attempt) for rollout, attempt in self.attempts.items() if attempt >= 0]
        checkpoint_id = self.checkpoint_id("new")
        if named:
            self.run(self.stand.retire(checkpoint_id, *named))
            self.retired |= {EpisodeId(e.rollout_id, n) for e in named for n in range(e.attempt + 1)}
        reply = self.run(self.stand.restore(checkpoint_id, source, named))
        newest: dict[str, EpisodeId] = {}
        for episode in sorted(map(EpisodeId.parse, self.stored[source])):
            newest[episode.rollout_id] = episode
        assert sorted(reply.restored) == sorted(named_by(named)[rollout].next.capture_key for rollout in newest)
        for rollout, episode in newest.items():
            now = named_by(named)[rollout].next
            assert self.role.restored[now] == self.stored[source][episode.capture_key]
            self.attempts[rollout] = now.attempt

    def heal(self) -> None:
        self.fs.failing = False
        self.offload.let_go()
        self.role.let_go.set()
        self.run(asyncio.sleep(1))

    def call_held(self, operation: Coroutine[Any, Any, T]) -> T | ControlError | None:
        """As `call`; None where stalled threads hold the call itself at a crash point."""
        try:
            return self.call(operation)
        except TimeoutError:
            return None

    # What always holds

    @invariant()
    def admission_is_open_exactly_when_idle(self) -> None:
        if hasattr(self, "participant"):
            assert (self.participant.phase == "idle") == self.role.gate.is_open

    @invariant()
    def nothing_is_published_after_its_resume(self) -> None:
        if hasattr(self, "participant"):
            for checkpoint_id, manifest in self.frozen.items():
                assert self.manifest(checkpoint_id) == manifest

    @invariant()
    def a_retired_attempt_is_refused(self) -> None:
        if hasattr(self, "participant"):
            assert all(self.role.marks.refuses(episode) for episode in self.retired)

    @invariant()
    def no_lease_lies_in_the_past(self) -> None:
        if hasattr(self, "participant"):
            expires_at_s = self.participant._state.lease.expires_at_s
            assert expires_at_s is None or expires_at_s > self.loop.time()

    @rule()
    def a_dead_controller_freezes_nobody(self) -> None:
        self.heal()
        self.run(asyncio.sleep(3600 + GRACE_S + 1))
        assert self.stand.is_open()
        assert self.participant._state.active is None


OneParticipant.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_one_participant_keeps_its_rules = OneParticipant.TestCase
