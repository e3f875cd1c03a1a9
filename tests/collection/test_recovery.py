"""The recovery planner: journals, statuses and checkpoints in, steps out."""

from dataclasses import dataclass, field, replace
from pathlib import PurePath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymckpt.collection.events import FROM_INPUT, Install, Source
from gymckpt.collection.history import Attempt, History, RolloutHistory
from gymckpt.collection.recovery import (
    Candidate,
    Fence,
    Forget,
    Intend,
    Open,
    Restore,
    Retire,
    Start,
    plan_recovery,
)
from gymckpt.coordination import Deployment, ParticipantName, ParticipantRef
from gymckpt.errors import ServerError
from gymckpt.identity import EpisodeId, Kind
from gymckpt.ports import ServerRef
from gymckpt.wire.control import EXTENSIONS, Phase, Report, Status

C1, C2, C3 = "ckpt-000001-00000001", "ckpt-000002-00000002", "ckpt-000003-00000003"
NAMES: list[ParticipantName] = [("environment", "env"), ("agent", "agent"), ("resources", "tools")]


def participant(kind: Kind, instance: str, *, ours: bool = True) -> ParticipantRef:
    extensions = frozenset(EXTENSIONS) if ours else frozenset[str]()
    return ParticipantRef(ServerRef(instance, f"http://{instance}"), kind, instance, "boot", extensions)


OURS = Deployment(tuple(participant(*name) for name in NAMES))
WITH_GYM = Deployment((participant(*NAMES[0], ours=False), *OURS.participants[1:]))


def statuses(**held: tuple[Phase, str]) -> dict[ParticipantName, Status]:
    found: dict[ParticipantName, Status] = {}
    for kind, instance in NAMES:
        status = Status(kind=kind, instance=instance, phase="idle", report=Report(ready=True))
        if instance in held:
            status = status.model_copy(update={"phase": held[instance][0], "checkpoint_id": held[instance][1]})
        found[(kind, instance)] = status
    return found


def rollout(rollout_id: str, *sources: Source, spent: int = -1) -> RolloutHistory:
    return RolloutHistory(rollout_id, tuple(Attempt(n, source) for n, source in enumerate(sources)), spent)


def history(*rollouts: RolloutHistory, ids: tuple[str, ...] = (C1, C2), open_ids: tuple[str, ...] = ()) -> History:
    return History("run", {r.rollout_id: r for r in rollouts}, (), frozenset({*ids, *open_ids}), frozenset(open_ids))


def candidate(checkpoint_id: str, *continued: EpisodeId) -> Candidate:
    return Candidate(checkpoint_id, PurePath("/run") / checkpoint_id, continued, frozenset(NAMES))


def test_a_dead_run_is_fenced_intended_retired_restored_opened_in_this_order() -> None:
    past = history(rollout("r1", FROM_INPUT), rollout("r2", FROM_INPUT), open_ids=(C3,))
    past = replace(past, uncleared=(EpisodeId("r0", 1),))
    plan = plan_recovery(past, OURS, statuses(), [candidate(C2, EpisodeId("r1"))])
    r0, r1, r2 = EpisodeId("r0", 1), EpisodeId("r1"), EpisodeId("r2")
    assert plan.steps == (
        Fence((C3,)),
        Intend(C2, (Install("r1", 0, 1),)),
        Retire((r0, r1, r2)),
        Forget((r0,)),
        Restore(C2, PurePath("/run") / C2, (r1,), frozenset(NAMES)),
        Open(C2),
    )
    assert plan.starts == {"r1": Start(r1.next, Source(C2, 0)), "r2": Start(r2.next, FROM_INPUT)}
    assert plan.restored == (r1.next,)
    assert [number for number, _ in plan.numbered()] == [1, 2, 3, 4, 5, 6]


def test_a_rollout_with_an_outcome_is_never_restored() -> None:
    plan = plan_recovery(history(), OURS, statuses(), [candidate(C2, EpisodeId("r1"))])
    assert plan.steps == ()
    assert plan.starts == {}


def test_an_attempt_that_failed_since_the_checkpoint_starts_over_from_the_input() -> None:
    plan = plan_recovery(
        history(rollout("r1", FROM_INPUT, spent=0)), OURS, statuses(), [candidate(C2, EpisodeId("r1"))]
    )
    assert plan.checkpoint_id is None
    assert plan.starts["r1"] == Start(EpisodeId("r1", 1), FROM_INPUT)


def test_later_attempts_that_descend_from_the_checkpoint_do_not_keep_it_from_being_restored_again() -> None:
    past = history(rollout("r1", FROM_INPUT, Source(C2, 0), Source(C2, 0)))
    plan = plan_recovery(past, OURS, statuses(), [candidate(C2, EpisodeId("r1"))])
    assert plan.starts["r1"] == Start(EpisodeId("r1", 3), Source(C2, 0))
    [restore] = [step for step in plan.steps if isinstance(step, Restore)]
    assert restore.named == (EpisodeId("r1", 2),)


def test_after_a_newer_checkpoint_turned_out_damaged_its_descendants_go_back_to_the_one_before() -> None:
    past = history(rollout("r1", FROM_INPUT, Source(C2, 0), Source(C2, 0)))
    assert plan_recovery(past, OURS, statuses(), [candidate(C1, EpisodeId("r1"))]).checkpoint_id == C1


def test_an_attempt_from_the_input_or_from_an_older_checkpoint_makes_the_recorded_one_obsolete() -> None:
    from_input = history(rollout("r1", FROM_INPUT, FROM_INPUT))
    from_older = history(rollout("r1", FROM_INPUT, Source(C1, 0)))
    for past in (from_input, from_older):
        plan = plan_recovery(past, OURS, statuses(), [candidate(C2, EpisodeId("r1"))])
        assert plan.checkpoint_id is None
        assert plan.starts["r1"].source == FROM_INPUT


def test_a_checkpoint_of_the_second_attempt_does_not_care_what_the_first_came_from() -> None:
    past = history(rollout("r1", FROM_INPUT, FROM_INPUT))
    assert plan_recovery(past, OURS, statuses(), [candidate(C2, EpisodeId("r1", 1))]).checkpoint_id == C2


def test_a_participant_that_restores_only_the_recorded_attempt_gets_no_later_one() -> None:
    past = history(rollout("r1", FROM_INPUT), rollout("r2", FROM_INPUT, Source(C2, 0)))
    both = [candidate(C2, EpisodeId("r1"), EpisodeId("r2"))]
    plan = plan_recovery(past, WITH_GYM, statuses(), both)
    assert plan.starts["r1"].source == Source(C2, 0)
    assert plan.starts["r2"] == Start(EpisodeId("r2", 2), FROM_INPUT)
    assert "environment env" in plan.notes[0]
    assert plan_recovery(past, OURS, statuses(), both).starts["r2"].source == Source(C2, 0)


def test_our_own_open_checkpoint_is_aborted_and_a_foreign_one_is_named_and_left_alone() -> None:
    past = history(rollout("r1", FROM_INPUT))
    plan = plan_recovery(past, OURS, statuses(tools=("committed", C1)), [])
    assert plan.steps[0] == Fence((C1,))
    with pytest.raises(ServerError, match=r"resources tools is prepared for ckpt-000009-0000000f") as failure:
        plan_recovery(past, OURS, statuses(tools=("prepared", "ckpt-000009-0000000f")), [])
    assert failure.value.exit_code == 5


def test_starting_over_restores_nothing_but_still_retires() -> None:
    plan = plan_recovery(
        history(rollout("r1", FROM_INPUT)), OURS, statuses(), [candidate(C2, EpisodeId("r1"))], start_over=True
    )
    assert plan.steps == (Retire((EpisodeId("r1"),)),)
    assert plan.starts["r1"] == Start(EpisodeId("r1", 1), FROM_INPUT)


def test_without_participants_everything_starts_over_and_no_server_is_asked() -> None:
    plan = plan_recovery(
        history(rollout("r1", FROM_INPUT), open_ids=(C3,)), Deployment(()), {}, [candidate(C2, EpisodeId("r1"))]
    )
    assert plan.steps == ()
    assert plan.starts["r1"].episode == EpisodeId("r1", 1)


def test_a_checkpoint_of_a_participant_that_is_gone_is_not_restored_and_it_says_so() -> None:
    plan = plan_recovery(
        history(rollout("r1", FROM_INPUT)), OURS.only(NAMES[:2]), statuses(), [candidate(C2, EpisodeId("r1"))]
    )
    assert plan.checkpoint_id is None
    assert "resources tools" in plan.notes[0]


def test_a_checkpoint_salvaged_from_a_damaged_one_continues_what_came_from_that_one() -> None:
    past = history(rollout("r1", FROM_INPUT, Source(C2, 0)), ids=(C1, C2, C3))
    salvaged = replace(candidate(C3, EpisodeId("r1")), made_of=C2)
    assert plan_recovery(past, OURS, statuses(), [salvaged]).starts["r1"].source == Source(C3, 0)
    assert plan_recovery(past, OURS, statuses(), [candidate(C3, EpisodeId("r1"))]).starts["r1"].source == FROM_INPUT


# A run under a fault-loving scheduler: any mix of dispatches, failures, outcomes, checkpoints and recoveries, each
# recovery dying after any of its steps.


@dataclass
class Past:
    """A run as its journals would tell it."""

    rollouts: dict[str, RolloutHistory] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    checkpoints: list[Candidate] = field(default_factory=list)
    heard: set[EpisodeId] = field(default_factory=set)
    """Every attempt that any server may have heard of."""

    @property
    def now(self) -> History:
        open_rollouts = {key: value for key, value in self.rollouts.items() if key not in self.finished}
        return History("run", open_rollouts, (), frozenset(c.checkpoint_id for c in self.checkpoints), frozenset())

    def dispatch(self, start: Start) -> None:
        assert start.episode not in self.heard or not start.source.is_input
        assert start.episode.rollout_id not in self.finished
        self.heard.add(start.episode)
        self._learn(start.episode, start.source)

    def _learn(self, episode: EpisodeId, source: Source) -> None:
        before = self.rollouts.get(episode.rollout_id, RolloutHistory(episode.rollout_id, ()))
        if episode.attempt not in {attempt.number for attempt in before.attempts}:
            attempts = (*before.attempts, Attempt(episode.attempt, source))
            self.rollouts[episode.rollout_id] = replace(before, attempts=attempts)

    def recover(self, steps_survived: int, damaged: int) -> None:
        """A recovery that dies after so many steps (or lives), with the newest `damaged` checkpoints unreadable."""
        plan = plan_recovery(self.now, OURS, statuses(), self.checkpoints[::-1][damaged:])
        for number, step in plan.numbered():
            if number > steps_survived:
                return
            if isinstance(step, Intend):
                for install in step.installs:
                    episode = EpisodeId(install.rollout_id, install.installed)
                    assert episode not in self.heard
                    self.heard.add(episode)
                    self._learn(episode, Source(step.checkpoint_id, install.recorded))
            if isinstance(step, Restore):
                self._check_restore(step, self.checkpoints[::-1][damaged:][0])
        for start in plan.starts.values():
            if not start.source.is_input:
                assert start.episode in self.heard
            self.dispatch(start)

    def _check_restore(self, step: Restore, source: Candidate) -> None:
        recorded = {episode.rollout_id: episode.attempt for episode in source.continued}
        for named in step.named:
            assert named.rollout_id not in self.finished
            attempts = self.rollouts[named.rollout_id]
            assert recorded[named.rollout_id] > attempts.spent
            assert named.attempt + 1 == attempts.last.attempt


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("dispatch"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("fail"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("finish"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("checkpoint"), st.integers(0, 15), st.just(0)),
        st.tuples(st.just("recover"), st.integers(0, 7), st.integers(0, 2)),
    ),
    max_size=25,
)


@settings(max_examples=300)
@given(ACTIONS)
def test_whatever_happened_no_attempt_is_sent_twice_and_nothing_that_ended_comes_back(
    actions: list[tuple[str, int, int]],
) -> None:
    past = Past()
    for action, number, damaged in actions:
        rollout_id = f"r{number % 4}"
        known = past.rollouts.get(rollout_id)
        match action:
            case "dispatch" if known is None:
                past.dispatch(Start(EpisodeId(rollout_id), FROM_INPUT))
            case "fail" if known is not None and rollout_id not in past.finished:
                past.rollouts[rollout_id] = replace(known, spent=known.last.attempt)
                past.dispatch(Start(known.last.next, FROM_INPUT))
            case "finish" if known is not None:
                past.finished.add(rollout_id)
            case "checkpoint":
                running = [r.last for r in past.rollouts.values() if r.rollout_id not in past.finished]
                chosen = [episode for bit, episode in enumerate(running) if number >> bit & 1]
                sequence = len(past.checkpoints) + 1
                past.checkpoints.append(candidate(f"ckpt-{sequence:06d}-00000000", *chosen))
            case "recover":
                past.recover(number, damaged)
            case _:
                pass
    # However often it died, one more recovery brings every unfinished rollout exactly one next attempt.
    plan = plan_recovery(past.now, OURS, statuses(), past.checkpoints[::-1])
    assert set(plan.starts) == set(past.now.unfinished)
    for start in plan.starts.values():
        assert start.episode not in past.heard
    assert plan == plan_recovery(past.now, OURS, statuses(), past.checkpoints[::-1])
