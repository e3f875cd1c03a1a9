"""What carrying rollouts out needs of the collector around it: durable events, retires, and word of the servers."""

from typing import Any, Protocol

from gymckpt.collection.events import Event, Outcome
from gymckpt.identity import EpisodeId


class Surroundings(Protocol):
    """What the dispatcher needs of the collector around it."""

    async def record(self, event: Event) -> None:
        """Return once the event is durable and applied."""
        ...

    async def commit(self, outcome: Outcome, *, large: bool) -> None:
        """`record`, then the result files, then those who watch. `large`: its row is worth a thread."""
        ...

    async def replied_row(self, rollout_id: str) -> dict[str, Any] | None:
        """The row with which a member of a cohort replied, from the journal."""
        ...

    async def retire(self, episode: EpisodeId) -> None:
        """Return once the attempt is retired everywhere."""
        ...

    async def unreachable(self, instance: str) -> None:
        """A connection was refused: return once the server answers again (dispatch stands still meanwhile)."""
        ...

    async def gone(self, instance: str) -> bool:
        """After a connection broke: whether the server is gone. If so, returns once it answers again."""
        ...

    async def rebooted(self) -> bool:
        """Before a failed reply is counted: whether a server was started again. If so, a recovery is under way."""
        ...

    async def replaced(self) -> bool:
        """Before any reply is counted: whether a server that cannot say so itself is another process than it was. If
        so, a recovery is under way."""
        ...
