"""The servers that one controller drives: which are participants, and in which order each operation meets them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TypeAlias

from gymckpt.identity import Kind
from gymckpt.ports import Deadline, ServerRef
from gymckpt.wire.control import ResourcesMode, Status, VerifyMode

ParticipantName: TypeAlias = tuple[Kind, str]
"""(kind, instance): unique in a deployment, and the participant's place in a checkpoint directory."""

Stages: TypeAlias = tuple[tuple[Kind, ...], ...]

PREPARE_ORDER: Stages = (("environment",), ("model",), ("agent",), ("resources",))
"""Callers close before the servers they call, so that what is under way can still end. The model goes early: it only
holds replies back, and an agent becomes ready once its model calls wait."""
RESUME_ORDER: Stages = tuple(reversed(PREPARE_ORDER))
RETIRE_ORDER: Stages = (("environment",), ("agent",), ("model", "resources"))
"""Whoever would call again is stopped first."""


@dataclass(frozen=True, slots=True)
class ParticipantRef:
    """A participant as its status described it."""

    server: ServerRef
    kind: Kind
    instance: str
    boot_id: str | None = None
    """New at every process start; None where a server does not say."""
    extensions: frozenset[str] = frozenset()
    skew_s: float = 0.0
    """How far its wall clock is ahead of ours; 0 where the difference is below what can be measured."""
    mode: ResourcesMode | None = None
    verify: VerifyMode | None = None

    @property
    def name(self) -> ParticipantName:
        return self.kind, self.instance

    def offers(self, extension: str) -> bool:
        """Whether its status advertised `extension` (`wire.control.EXTENSION_...`)."""
        return extension in self.extensions

    def deadline_ts(self, deadline: Deadline) -> float:
        """`deadline` in unix seconds on this participant's own clock."""
        return deadline.clock.time() + (deadline.at_s - deadline.clock.monotonic()) + self.skew_s

    def __str__(self) -> str:
        return f"{self.kind} {self.instance}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """The participants among the servers, and the servers that are none (`plain`)."""

    participants: tuple[ParticipantRef, ...]
    plain: tuple[ServerRef, ...] = ()

    @property
    def names(self) -> frozenset[ParticipantName]:
        return frozenset(participant.name for participant in self.participants)

    def owner(self, server_instance: str) -> ParticipantRef | None:
        """The participant behind the server that the controller calls `server_instance`; None if it is none."""
        for participant in self.participants:
            if participant.server.instance == server_instance:
                return participant
        return None

    def stages(self, order: Stages) -> list[tuple[ParticipantRef, ...]]:
        """The participants in groups, in `order`; groups without a participant are left out."""
        groups = (tuple(p for p in self.participants if p.kind in kinds) for kinds in order)
        return [group for group in groups if group]

    def only(self, names: Collection[ParticipantName]) -> "Deployment":
        """The same deployment with only the participants named."""
        return replace(self, participants=tuple(p for p in self.participants if p.name in names))

    def lacking(self, extension: str) -> tuple[ParticipantRef, ...]:
        """The participants that do not offer `extension`."""
        return tuple(p for p in self.participants if not p.offers(extension))

    def rebooted(self, statuses: Mapping[ParticipantName, Status]) -> tuple[ParticipantRef, ...]:
        """The participants whose process is another one than when this deployment was discovered."""
        return tuple(
            p
            for p in self.participants
            if p.boot_id is not None and p.name in statuses and statuses[p.name].boot_id != p.boot_id
        )

    def updated(self, statuses: Mapping[ParticipantName, Status]) -> "Deployment":
        """The same deployment with the boot ids and extensions of newer statuses."""
        return replace(
            self,
            participants=tuple(
                replace(p, boot_id=status.boot_id, extensions=frozenset(status.extensions))
                if (status := statuses.get(p.name)) is not None
                else p
                for p in self.participants
            ),
        )


@dataclass(frozen=True, slots=True)
class PathMapping:
    """Below `local` here is `remote` there; `server` limits it to one server (None = all)."""

    local: PurePath
    remote: PurePath
    server: str | None = None


@dataclass(frozen=True, slots=True)
class PathMap:
    """How servers with other mounts see our directories. The mapping with the longest matching `local` counts; one that
    names the server goes before one that does not. Without a match a path is sent as it is."""

    mappings: tuple[PathMapping, ...] = ()

    def seen_by(self, participant: ParticipantRef, path: PurePath) -> str:
        """`path` (absolute here) as `participant` sees it."""
        matching = [
            mapping
            for mapping in self.mappings
            if mapping.server in (None, participant.server.instance) and path.is_relative_to(mapping.local)
        ]
        if not matching:
            return str(path)
        best = max(matching, key=lambda mapping: (mapping.server is not None, len(mapping.local.parts)))
        return str(best.remote / path.relative_to(best.local))


NO_PATH_MAP = PathMap()


def describe(participants: Iterable[ParticipantRef]) -> str:
    """Participants as a person reads them: `environment main, agent simple`."""
    return ", ".join(str(participant) for participant in participants)
