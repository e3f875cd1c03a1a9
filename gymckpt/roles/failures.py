"""How an episode fails: where, in which way, and whether trying again can help. A failure is never a reward."""

from typing import Any

from gymckpt.errors import GymckptError
from gymckpt.roles.neighbours import NeighbourFailed
from gymckpt.wire.gym import Stage


class EpisodeFailed(GymckptError):
    """An episode cannot go on. `kind` is a short code for accounting; `terminal`: a new attempt is of no use."""

    code = "episode_failed"
    http_status = 502

    def __init__(self, stage: Stage, kind: str, reason: str, *, terminal: bool = False) -> None:
        super().__init__(reason)
        self.stage: Stage = stage
        self.kind = kind
        self.terminal = terminal

    @classmethod
    def at(cls, stage: Stage, cause: GymckptError) -> "EpisodeFailed":
        """The failure that `cause` means at `stage`."""
        if isinstance(cause, EpisodeFailed):
            return cause
        if isinstance(cause, NeighbourFailed):
            return cls(stage, cause.kind, cause.detail, terminal=cause.terminal)
        return cls(stage, cause.code, cause.detail)

    def as_json(self) -> dict[str, Any]:
        """As the typed reply to `/run` says it."""
        return {
            "failure_reason": self.detail,
            "terminal": self.terminal,
            "failure_kind": self.kind,
            "stage": self.stage,
        }
