"""What `verify` finds."""

from dataclasses import dataclass

from gymckpt.errors import DamagedState, StorageUnavailable
from gymckpt.identity import EpisodeId


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it was written: what (naming file, and frame where known), and whom it costs."""

    what: str
    episodes: tuple[EpisodeId, ...] = ()
    unreadable: bool = False
    """It could not be read now: nothing is known to be damaged."""

    @classmethod
    def of(cls, error: DamagedState | StorageUnavailable, *episodes: EpisodeId) -> "Problem":
        return cls(error.detail, episodes, isinstance(error, StorageUnavailable))

    def __str__(self) -> str:
        names = ", ".join(str(episode) for episode in self.episodes[:10])
        more = f" and {len(self.episodes) - 10} more" if len(self.episodes) > 10 else ""
        return f"{self.what} (episodes: {names}{more})" if self.episodes else self.what
