"""The model server's record of one episode: `{episode_id, rows[], generation_cuts[<= 1]}`, out and in."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymckpt.errors import InvalidCheckpointState
from gymckpt.identity import EpisodeId
from gymckpt.roles.ledger_rows import Row, row_problem
from gymckpt.roles.model_cuts import Cut, read_cut
from gymckpt.storage.records import Record, StoredRecord

logger = logging.getLogger("gymckpt.model")


@dataclass(frozen=True, slots=True)
class Restored:
    """A record that was checked. `episode` is the attempt that wrote it."""

    episode: EpisodeId
    rows: list[Row]
    cut: Cut | None


def record_of(episode: EpisodeId, rows: list[Row], cut: Cut | None = None) -> Record:
    """The record of an episode with these delivered calls."""
    return {
        "episode_id": {"rollout_id": episode.rollout_id, "attempt": episode.attempt},
        "rows": rows,
        "generation_cuts": [] if cut is None else [cut.without_tokens()],
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
    return Restored(episode, rows, _cut(episode, cuts[0], stored.prefix) if cuts else None)


def staging_keys(rows: Sequence[Row], cut: Cut | None = None) -> list[str]:
    """Where trainers find the tokens of these calls, and of the one that was cut."""
    keys = [row["staging_key"] for row in rows if isinstance(row.get("staging_key"), str)]
    return keys if cut is None else keys + cut.claim.staging_keys


def _cut(episode: EpisodeId, value: Any, tokens: Mapping[str, Any] | None) -> Cut | None:
    """A cut that cannot be read is another implementation's: its call is generated again, nothing else is lost."""
    try:
        return read_cut(value, tokens)
    except ValueError as error:
        logger.warning("the generation cut of episode %s is not used: %s", episode, str(error)[:300])
        return None
