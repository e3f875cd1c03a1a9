"""The one recovery procedure as a plan: journals, statuses and checkpoints in, numbered steps out. Pure.

The same plan serves a dead collector, a dead server, a server that was started again, and a recovery that died on its
way: every step may be repeated, and whatever a step may have done is durable before it is done.

    fence -> intend -> retire -> forget -> restore -> open        and then the collector dispatches `starts`

An attempt number that anyone may have heard of (dispatched, or intended by a restore that may have installed it) is
never used again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeAlias

from gymckpt.collection.events import FROM_INPUT, Install, Source
from gymckpt.collection.history import History
from gymckpt.coordination import Deployment, ParticipantName, describe
from gymckpt.errors import ServerError
from gymckpt.identity import EpisodeId
from gymckpt.wire.control import EXTENSION_RESTORE_LATER_ATTEMPT, Status


@dataclass(frozen=True, slots=True)
class Candidate:
    """A published checkpoint of this run that could be restored."""

    checkpoint_id: str
    directory: PurePath
    continued: tuple[EpisodeId, ...]
    participants: frozenset[ParticipantName]
    """Those that have a part in it."""
    made_of: str | None = None
    """The damaged checkpoint that this one was salvaged from: attempts that came from that one descend from this."""

    @property
    def state_id(self) -> str:
        """The checkpoint whose state this is."""
        return self.made_of or self.checkpoint_id


@dataclass(frozen=True, slots=True)
class Fence:
    """Resume these ids of our own everywhere: an open one is aborted, a late call of one finds it stale."""

    checkpoint_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Intend:
    """Make durable which checkpoint will be restored, and what becomes of each rollout in it."""

    checkpoint_id: str
    installs: tuple[Install, ...]


@dataclass(frozen=True, slots=True)
class Retire:
    """Stop and free these attempts and every earlier one, everywhere: restored but unclaimed ones included."""

    episodes: tuple[EpisodeId, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the marks of rollouts that have an outcome (just retired)."""

    episodes: tuple[EpisodeId, ...]


@dataclass(frozen=True, slots=True)
class Restore:
    """Install the checkpoint, all or nothing. `named` are the last attempts ever dispatched or installed."""

    checkpoint_id: str
    directory: PurePath
    named: tuple[EpisodeId, ...]
    participants: frozenset[ParticipantName]


@dataclass(frozen=True, slots=True)
class Open:
    """Resume the restore everywhere: admission opens, replacements may come."""

    checkpoint_id: str


Step: TypeAlias = Fence | Intend | Retire | Forget | Restore | Open


@dataclass(frozen=True, slots=True)
class Start:
    """The next attempt of an unfinished rollout, and where it starts."""

    episode: EpisodeId
    source: Source


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What to do, in order, and what to dispatch afterwards."""

    steps: tuple[Step, ...]
    starts: Mapping[str, Start] = field(default_factory=dict)
    """By rollout id, for every unfinished rollout that was ever dispatched."""
    checkpoint_id: str | None = None
    """The checkpoint that it restores, if any."""
    notes: tuple[str, ...] = ()
    """What a person should know: why a rollout or all of them start over."""

    def numbered(self) -> Iterator[tuple[int, Step]]:
        """The steps with their numbers, from 1."""
        return enumerate(self.steps, 1)

    @property
    def restored(self) -> tuple[EpisodeId, ...]:
        """The new attempts that continue from a boundary."""
        return tuple(start.episode for start in self.starts.values() if not start.source.is_input)


def plan_recovery(
    history: History,
    deployment: Deployment,
    statuses: Mapping[ParticipantName, Status],
    candidates: Sequence[Candidate],
    *,
    start_over: bool = False,
) -> RecoveryPlan:
    """Plan a recovery onto `deployment`. `candidates` are valid published checkpoints of this run, newest first; the
    first one counts, the others only stand by for when it cannot be restored. `start_over` restores none.

    Raises `ServerError` (exit 5) if a participant is held by a checkpoint that is not ours.
    """
    held = _own_ids_held(history, statuses)
    steps: list[Step] = []
    if deployment.participants and (fence := tuple(sorted(history.open_ids | held))):
        steps.append(Fence(fence))
    candidate = None if start_over or not candidates or not deployment.participants else candidates[0]
    notes: list[str] = []
    installs = _installs(history, deployment, candidate, notes) if candidate is not None else ()
    if candidate is not None and installs:
        steps.append(Intend(candidate.checkpoint_id, installs))
    if deployment.participants:
        steps += _clearing(history)
    if candidate is not None and installs:
        named = tuple(EpisodeId(install.rollout_id, install.installed - 1) for install in installs)
        steps.append(Restore(candidate.checkpoint_id, candidate.directory, named, candidate.participants))
        steps.append(Open(candidate.checkpoint_id))
    return RecoveryPlan(
        steps=tuple(steps),
        starts=_starts(history, candidate.checkpoint_id if candidate else "", installs),
        checkpoint_id=candidate.checkpoint_id if candidate is not None and installs else None,
        notes=tuple(notes),
    )


def _own_ids_held(history: History, statuses: Mapping[ParticipantName, Status]) -> frozenset[str]:
    held: set[str] = set()
    for (kind, instance), status in statuses.items():
        if status.phase == "idle" or status.checkpoint_id is None:
            continue
        if status.checkpoint_id not in history.checkpoint_ids:
            raise ServerError(
                f"{kind} {instance} is {status.phase} for {status.checkpoint_id}, which is no checkpoint of this run",
                hint="another controller uses these servers: wait until it has resumed them, or resume that id",
            )
        held.add(status.checkpoint_id)
    return frozenset(held)


def _clearing(history: History) -> list[Step]:
    unfinished = [rollout.last for rollout in history.unfinished.values()]
    everything = tuple(sorted({*unfinished, *history.uncleared}))
    steps: list[Step] = [Retire(everything)] if everything else []
    if history.uncleared:
        steps.append(Forget(tuple(sorted(history.uncleared))))
    return steps


def _installs(history: History, deployment: Deployment, candidate: Candidate, notes: list[str]) -> tuple[Install, ...]:
    if missing := candidate.participants - deployment.names:
        gone = ", ".join(f"{kind} {instance}" for kind, instance in sorted(missing))
        notes.append(f"{candidate.checkpoint_id} cannot be restored: {gone} had a part in it and is not here")
        return ()
    exact_only = deployment.lacking(EXTENSION_RESTORE_LATER_ATTEMPT)
    installs: list[Install] = []
    not_exact: list[EpisodeId] = []
    for episode in sorted(candidate.continued):
        rollout = history.unfinished.get(episode.rollout_id)
        if rollout is None or not rollout.continues(candidate.state_id, episode.attempt):
            continue
        if exact_only and rollout.last != episode:
            not_exact.append(episode)
            continue
        installs.append(Install(episode.rollout_id, episode.attempt, rollout.last.attempt + 1))
    if not_exact:
        notes.append(
            f"{len(not_exact)} rollouts start over: {describe(exact_only)} can only restore the attempt that the "
            f"checkpoint recorded, and later ones were sent since (first: {not_exact[0]})"
        )
    return tuple(installs)


def _starts(history: History, checkpoint_id: str, installs: Sequence[Install]) -> dict[str, Start]:
    continued = {install.rollout_id: install for install in installs}
    starts: dict[str, Start] = {}
    for rollout_id, rollout in history.unfinished.items():
        install = continued.get(rollout_id)
        source = FROM_INPUT if install is None else Source(checkpoint_id, install.recorded)
        starts[rollout_id] = Start(rollout.last.next, source)
    return starts
