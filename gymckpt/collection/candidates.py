"""Which checkpoints of a run a recovery may stand on."""

from collections.abc import Sequence
from dataclasses import replace

from gymckpt.collection.recovery import Candidate
from gymckpt.identity import EpisodeId
from gymckpt.storage.checkpoints import CheckpointDirectory, PublishedCheckpoint
from gymckpt.storage.problems import Problem


def candidate(published: PublishedCheckpoint) -> Candidate:
    """A published checkpoint as the planner sees it."""
    return Candidate(
        checkpoint_id=published.checkpoint_id,
        directory=published.path,
        continued=tuple(published.collection.continued),
        participants=frozenset(published.participants),
    )


async def find_candidates(
    directory: CheckpointDirectory, run_id: str, *, salvage: bool = False
) -> tuple[list[Candidate], list[Problem]]:
    """The run's published checkpoints that can be stood on, newest first, and what is wrong with newer ones.

    The first one is checked to its last byte; older ones only stand by, and participants check what they restore.
    `salvage`: one whose damage is confined to named episodes counts too, without them.
    """
    listed = await directory.listing()
    problems = [entry.problem for entry in listed if entry.problem is not None]
    published = [e.published for e in listed if e.published is not None and e.published.collection.run_id == run_id]
    published.sort(key=lambda checkpoint: checkpoint.age, reverse=True)
    found: list[Candidate] = []
    for checkpoint in published:
        if any(not standing.unusable for standing in found):
            found.append(candidate(checkpoint))
            continue
        wrong = await directory.verify(checkpoint)
        problems += wrong
        if not wrong:
            found.append(candidate(checkpoint))
        elif salvage and (damaged := confined(wrong)):
            found.append(replace(candidate(checkpoint), unusable=damaged))
    return found, problems


def confined(problems: Sequence[Problem]) -> frozenset[EpisodeId]:
    """The episodes that these problems are confined to; empty if any of them is not."""
    if not all(problem.episodes for problem in problems):
        return frozenset()
    return frozenset(episode for problem in problems for episode in problem.episodes)
