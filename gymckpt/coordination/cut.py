"""The check of the cut: which episodes a checkpoint continues, and why it will not continue the others. Pure.

continued = in scope, committed by its owner with a boundary, and held by every participant that the boundary's
remaining steps will call (`needs`). Such a participant has needs of its own: an agent's loop calls a model and tools.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gymckpt.coordination.deployment import ParticipantName
from gymckpt.identity import EpisodeId
from gymckpt.storage.records import Needs

NO_REPLY = "no_reply"
NO_BOUNDARY = "no_boundary"


def cannot_capture(instance: str) -> str:
    """The reason of an episode that `instance` said it cannot capture (or that its owner, no participant, cannot)."""
    return f"cannot_capture:{instance}"


def missing_in(instance: str) -> str:
    """The reason of an episode whose remaining steps call `instance`, which committed nothing of it."""
    return f"missing_in:{instance}"


@dataclass(frozen=True, slots=True)
class Committed:
    """What one participant wrote: the episodes, and for those that have a boundary what it needs (None = no boundary).

    An episode without an entry in `needs` has none of its own: only what calls it decides.
    """

    episodes: Collection[EpisodeId]
    needs: Mapping[EpisodeId, Needs | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cut:
    """The verdict on every episode that was in flight, or restored and not yet sent."""

    continued: tuple[EpisodeId, ...]
    restarted: tuple[tuple[EpisodeId, str], ...]
    """With the reason."""
    ended: tuple[EpisodeId, ...]
    """Ended at the cut: their outcome is durable, there is nothing to continue."""


def ended_at_cut(
    owners: Mapping[EpisodeId, ParticipantName], committed: Mapping[ParticipantName, Committed]
) -> tuple[EpisodeId, ...]:
    """The episodes in scope that their owner no longer holds: their reply is on its way, or never comes."""
    held = {name: frozenset(part.episodes) for name, part in committed.items()}
    return tuple(episode for episode, owner in owners.items() if episode not in held.get(owner, frozenset()))


def check_cut(
    *,
    owners: Mapping[EpisodeId, ParticipantName],
    committed: Mapping[ParticipantName, Committed],
    restarts: Mapping[EpisodeId, str],
    replied: Collection[EpisodeId],
) -> Cut:
    """Judge a cut. `owners` maps every episode in scope to the participant that received its `/run`; `committed` holds
    every participant's answer; `restarts` maps episodes left out of the scope to the instance that cannot capture them;
    `replied` are those of `ended_at_cut` whose `/run` reply came and whose outcome is durable."""
    held = {name: frozenset(part.episodes) for name, part in committed.items()}
    ended_or_lost = frozenset(ended_at_cut(owners, committed))
    continued: list[EpisodeId] = []
    ended: list[EpisodeId] = []
    restarted = [(episode, cannot_capture(instance)) for episode, instance in restarts.items()]
    for episode, owner in owners.items():
        if episode in restarts:
            continue
        if episode in ended_or_lost:
            if episode in replied:
                ended.append(episode)
            else:
                restarted.append((episode, NO_REPLY))
        elif (reason := _why_not(episode, owner, committed, held)) is not None:
            restarted.append((episode, reason))
        else:
            continued.append(episode)
    return Cut(tuple(sorted(continued)), tuple(sorted(restarted)), tuple(sorted(ended)))


def _why_not(
    episode: EpisodeId,
    owner: ParticipantName,
    committed: Mapping[ParticipantName, Committed],
    held: Mapping[ParticipantName, frozenset[EpisodeId]],
) -> str | None:
    needs = committed[owner].needs.get(episode)
    if needs is None:
        return NO_BOUNDARY
    seen = {owner}
    waiting = list(needs)
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        if episode not in held.get(name, frozenset()):
            return missing_in(name[1])
        waiting += committed[name].needs.get(episode) or ()
    return None
