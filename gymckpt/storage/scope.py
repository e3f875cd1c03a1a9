"""Whether the parts of a checkpoint hold what it continues: the owner's boundary, and all that its next steps call.

Digests cannot tell: a part that lacks an episode may be whole in itself.
"""

from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import TypeAlias

from gymckpt.identity import EpisodeId, Kind
from gymckpt.storage.participantfiles import ParticipantFiles
from gymckpt.storage.problems import Problem
from gymckpt.storage.records import Needs

Name: TypeAlias = tuple[Kind, str]

OWNERS: tuple[Kind, ...] = ("environment", "agent")
"""Kinds that receive an episode's `/run`, and whose records have boundaries; where both hold one, the first owns it."""


class Holdings:
    """Who holds which of the episodes that a checkpoint continues, and what each boundary needs."""

    def __init__(self, continued: Iterable[EpisodeId]) -> None:
        self._continued = dict.fromkeys(continued)
        self._held: dict[Name, dict[EpisodeId, Needs | None]] = {}

    def add(self, name: Name, files: ParticipantFiles) -> None:
        """Take a participant's open files into account; raises `DamagedState`. Blocking.

        Gym's form does not say what a boundary needs.
        """
        self._held[name] = {
            line.episode: None if line.boundary is None else line.needs or ()
            for line in files.index()
            if line.episode in self._continued
        }

    def lacking(self, where: PurePath) -> list[Problem]:
        """What is missing where the file `where` says that it continues, participant by participant."""
        found: dict[str, list[EpisodeId]] = {}
        for episode in self._continued:
            for what in self._missing(episode):
                found.setdefault(f"{where}: it continues what {what}", []).append(episode)
        return [Problem(what, tuple(episodes)) for what, episodes in found.items()]

    def _missing(self, episode: EpisodeId) -> Iterator[str]:
        holders = [name for kind in OWNERS for name in self._held if name[0] == kind and episode in self._held[name]]
        owner = next((name for name in holders if self._held[name][episode] is not None), None)
        if owner is None:
            yield "no environment and no agent has a boundary of"
            return
        seen, waiting = {owner}, list(self._held[owner][episode] or ())
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if episode not in self._held.get(name, {}):
                yield f"the part of {name[0]} {name[1]} does not hold"
            else:
                waiting += self._held[name][episode] or ()
