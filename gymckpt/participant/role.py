"""What a role (environment, agent, model, resources) gives, so that the control plane can do everything else.

The control plane owns phase, fence, lease, marks, idempotence and files. A role owns episodes, sessions or calls.
All methods run on the event loop; none may block it.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from gymckpt.identity import EpisodeId, Kind
from gymckpt.participant.marks import Marks
from gymckpt.ports import Deadline
from gymckpt.storage.records import ExportedRecord, StoredRecord


@dataclass(frozen=True, slots=True)
class RoleReport:
    """What still keeps a closed role from being ready. Names are capture keys, or `<route>` for keyless requests."""

    blockers: Collection[str] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    restarts: Collection[str] = ()
    """Capture keys that this role cannot capture: frozen while closed, never blockers."""

    @property
    def ready(self) -> bool:
        return not self.blockers


@dataclass(frozen=True, slots=True)
class Installable:
    """Records that a role has checked and can install without failing; `prepared` is the role's own form of them."""

    episodes: Sequence[EpisodeId]
    prepared: Any


class Role(Protocol):
    """One kind of server, as the control plane sees it."""

    @property
    def kind(self) -> Kind: ...

    @property
    def instance(self) -> str: ...

    @property
    def marks(self) -> Marks:
        """What to refuse. The control plane raises and drops marks; the role checks them before it does anything for
        an attempt, and again after every wait for admission."""
        ...

    def close(self) -> None:
        """Admission closes: new work waits or is refused as not started; the set of restarts is frozen."""
        ...

    def open(self) -> None:
        """Admission opens: whatever waited goes on, ends recorded meanwhile are carried out. Safe to repeat."""
        ...

    def report(self) -> RoleReport:
        """What blocks now. Cheap: proportional to what is in flight, not to history."""
        ...

    async def changed(self) -> None:
        """Return when the report may have changed since the last call of `report`."""
        ...

    def export(self, scope: Collection[EpisodeId] | None) -> AsyncIterator[ExportedRecord]:
        """Records of the episodes in `scope` that live here (None = all), restarts excluded, each once."""
        ...

    async def validate(self, records: AsyncIterator[StoredRecord]) -> Installable:
        """Check all records without changing anything; raises `InvalidCheckpointState` naming the episode."""
        ...

    async def install(self, installable: Installable, attempts: Mapping[str, int]) -> None:
        """Install every record under attempt `attempts[rollout_id]`. Fails only by a bug; then nothing stays."""
        ...

    async def drop_restored(self, keep: Collection[EpisodeId]) -> None:
        """Free restored, never claimed state outside `keep`, leaving no mark."""
        ...

    async def suspend_compute(self, episodes: Collection[EpisodeId]) -> None:
        """Best effort: stop paying for external compute; only where `wake_compute` can undo it."""
        ...

    async def wake_compute(self, episodes: Collection[EpisodeId]) -> None: ...

    async def retire(self, episode: EpisodeId) -> None:
        """Stop and free this attempt and every earlier one of the rollout; return when nothing of them is left.

        The refusal mark is already up. Each task is cancelled once. Safe to call again after an interruption.
        """
        ...

    def live(self) -> Collection[str]:
        """What keeps this role from counting as emptied: capture keys or session ids, restored ones included."""
        ...

    def status(self) -> Mapping[str, Any]:
        """The fields of `GET /status` that only this kind has; `extensions` are added to those of every participant."""
        ...

    def commit_fields(self, exported: Sequence[EpisodeId]) -> Mapping[str, Any]:
        """The fields of a commit reply that only this kind has, for the episodes just exported."""
        ...


@runtime_checkable
class BeforeExport(Protocol):
    """What a role may have besides: something to do for a checkpoint before its records are exported."""

    async def before_export(self, checkpoint_id: str, scope: Collection[EpisodeId] | None, deadline: Deadline) -> None:
        """Called once, before the export of a commit begins. Best effort: must return well before `deadline`, and
        raise nothing but what is to fail the commit."""
        ...


@runtime_checkable
class WaitsFor(Protocol):
    """What a role may have besides: word of what keeps an export or an install from ending."""

    def waits_for(self) -> str | None:
        """It, for a person; None if nothing is known."""
        ...
