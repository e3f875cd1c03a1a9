"""What `verify` finds."""

from dataclasses import dataclass

from gymckpt.identity import EpisodeId


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it was written: where (file, and frame where known), what, and whom it costs."""

    where: str
    what: str
    episodes: tuple[EpisodeId, ...] = ()

    def __str__(self) -> str:
        lost = f" (episodes: {', '.join(str(e) for e in self.episodes[:10])}{', ...' if self.episodes[10:] else ''})"
        return f"{self.where}: {self.what}{lost if self.episodes else ''}"
