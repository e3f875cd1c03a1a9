"""The model server's record of one episode: `{episode_id, rows[], generation_cuts[<= 1]}`, out and in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gymckpt.errors import InvalidCheckpointState
from gymckpt.identity import EpisodeId
from gymckpt.roles.ledger_rows import Row, row_problem
from gymckpt.storage.records import Record, StoredRecord


@dataclass(frozen=True, slots=True)
class Restored:
    """A record that was checked. `episode` is the attempt that wrote it."""

    episode: EpisodeId
    rows: list[Row]
    cut: dict[str, Any] | None


def record_of(episode: EpisodeId, rows: list[Row], cut: dict[str, Any] | None = None) -> Record:
    """The record of an episode with these delivered calls."""
    return {
        "episode_id": {"rollout_id": episode.rollout_id, "attempt": episode.attempt},
        "rows": rows,
        "generation_cuts": [] if cut is None else [cut],
    }


def read_record(stored: StoredRecord) -> Restored:
    """Check a record; raises `InvalidCheckpointState` naming the episode and what is wrong."""
    record, episode = stored.record, stored.episode
    rows, cuts = record.get("rows"), record.get("generation_cuts", [])
    if not isinstance(rows, list) or not isinstance(cuts, list):
        raise InvalidCheckpointState(f"model record of episode {episode}: rows and generation_cuts must be lists")
    if record.get("episode_id") != {"rollout_id": episode.rollout_id, "attempt": episode.attempt}:
        raise InvalidCheckpointState(
            f"model record of episode {episode} says it is of {record.get('episode_id')!r:.200}"
        )
    for row in rows:
        if problem := row_problem(row):
            raise InvalidCheckpointState(f"model record of episode {episode}: {problem}")
    if len({row["call_id"] for row in rows}) != len(rows):
        raise InvalidCheckpointState(f"model record of episode {episode}: a call has two rows")
    if len(cuts) > 1:
        raise InvalidCheckpointState(f"model record of episode {episode}: {len(cuts)} generation cuts, at most one")
    return Restored(episode, rows, cuts[0] if cuts else None)


def staging_keys(rows: Sequence[Row]) -> list[str]:
    """Where trainers find the tokens of these calls."""
    return [row["staging_key"] for row in rows if isinstance(row.get("staging_key"), str)]
