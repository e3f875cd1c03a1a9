"""What is in a run directory, in one checkpoint of it, or in a checkpoint directory that somebody else wrote."""

from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Final

from gymckpt.collection.reading import look
from gymckpt.collection.run import Counts
from gymckpt.collection.rundirectory import RunPaths, RunRecord, read_run, split_checkpoint
from gymckpt.errors import NotAsAsked, UsageError
from gymckpt.identity import EpisodeId, checkpoint_sequence, is_safe_name
from gymckpt.ports import FileSystem, Offload, SystemClock
from gymckpt.report.documents import CheckpointView, EpisodeView, InspectDocument
from gymckpt.report.episodes import list_episodes, open_participant, participants
from gymckpt.storage.checkpoints import CheckpointDirectory, Listed, PublishedCheckpoint
from gymckpt.storage.durable import exists
from gymckpt.storage.published import PARTICIPANTS
from gymckpt.storage.reader import ParticipantReader

JSON_EPISODES: Final = 1_000_000
"""More episodes than this are cut from a document."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a verb was pointed at: a run, perhaps one checkpoint of it, or a checkpoint directory alone."""

    paths: RunPaths | None
    """None for a checkpoint directory without its run."""
    checkpoint: PurePath | None
    """The checkpoint to look at; None: the newest valid one of the run."""


def find_target(fs: FileSystem, path: PurePath, checkpoint_id: str | None) -> Target:
    """Look at `path`; raises `UsageError` if it is neither a run nor a checkpoint. Blocking."""
    if exists(fs, path) is None:
        raise UsageError(f"{path} does not exist", hint="give a run directory, or one checkpoint inside it")
    paths, inner = split_checkpoint(fs, path)
    if exists(fs, paths.run_json) is not None:
        chosen = checkpoint_id or inner
        if chosen is not None and (not is_safe_name(chosen) or exists(fs, paths.checkpoints / chosen) is None):
            raise UsageError(f"{paths.root} has no checkpoint {chosen[:160]!r}", hint=f"see: gymckpt inspect {path}")
        return Target(paths, paths.checkpoints / chosen if chosen else None)
    if exists(fs, path / PARTICIPANTS) is not None:
        if checkpoint_id not in (None, path.name):
            raise UsageError(f"{path} is one checkpoint, not a run with {checkpoint_id}")
        return Target(None, path)
    raise UsageError(
        f"{path} is neither a run (no run.json) nor a checkpoint (no {PARTICIPANTS}/)",
        hint="a run directory is made by: gymckpt collect ... --run-dir DIR",
    )


async def read_counts(fs: FileSystem, offload: Offload, paths: RunPaths) -> tuple[RunRecord, Counts]:
    """The run and its four sets as the journals have them; changes nothing. Raises `DamagedState`."""
    view = await look(fs, offload, SystemClock(), paths)
    return view.record, view.run.counts


async def inspect(fs: FileSystem, offload: Offload, target: Target, *, limit: int = JSON_EPISODES) -> InspectDocument:
    """Everything that `gymckpt inspect` shows; reads indexes and journals, no payload."""
    if target.paths is None:
        assert target.checkpoint is not None
        return await _inspect_alone(fs, offload, target.checkpoint, limit)
    record, counts = await read_counts(fs, offload, target.paths)
    directory = CheckpointDirectory(fs, offload, target.paths.checkpoints)
    views: list[CheckpointView] = []
    newest: PublishedCheckpoint | None = None
    for listed in await directory.listing():
        if listed.state == "unpublished":
            continue
        valid = listed.published is not None and not await directory.verify(listed.published, quick=True)
        views.append(_view(listed, valid=valid))
        if valid and listed.published is not None and listed.published.collection.run_id == record.run_id:
            newest = listed.published
    chosen = newest if target.checkpoint is None else await directory.open(target.checkpoint.name)
    episodes: list[EpisodeView] = []
    if chosen is not None:
        episodes = await list_episodes(fs, offload, chosen.path, chosen.collection)
    return InspectDocument(
        run_id=record.run_id,
        planned=counts.planned,
        succeeded=counts.succeeded,
        failed=counts.failed,
        omitted=counts.omitted,
        unresolved=counts.unresolved,
        checkpoints=views,
        checkpoint_id=chosen.checkpoint_id if chosen else None,
        episodes=episodes[:limit],
        truncated=len(episodes) > limit,
    )


async def newest_checkpoint(fs: FileSystem, offload: Offload, target: Target) -> PurePath:
    """The directory of the checkpoint that `target` means; raises `NotAsAsked` if the run has no valid one."""
    if target.checkpoint is not None:
        return target.checkpoint
    paths = target.paths
    assert paths is not None
    record = await offload.run(lambda: read_run(fs, paths))
    directory = CheckpointDirectory(fs, offload, paths.checkpoints)
    newest, _ = await directory.newest_valid(record.run_id, quick=True)
    if newest is None:
        raise NotAsAsked(f"{paths.root} has no valid checkpoint yet")
    return newest.path


async def exact_episode(fs: FileSystem, offload: Offload, checkpoint: PurePath, named: EpisodeId) -> EpisodeId:
    """The episode that a person means: the very attempt, or, where only the rollout was named, the one that is there.

    Raises `UsageError` if the checkpoint holds none.
    """
    attempts: set[EpisodeId] = set()
    for kind, instance in await offload.run(lambda: participants(fs, checkpoint)):
        reader = await open_participant(fs, offload, checkpoint, kind, instance)
        of_rollout = partial(_attempts, reader, named.rollout_id)
        attempts |= await offload.run(of_rollout)
    if named in attempts:
        return named
    if attempts and named.attempt == 0:
        return max(attempts)
    there = (
        f"it holds {', '.join(map(str, sorted(attempts)))}" if attempts else "gymckpt inspect lists the episodes in it"
    )
    raise UsageError(f"{checkpoint.name} holds nothing of episode {named}", hint=there)


def _attempts(reader: ParticipantReader, rollout_id: str) -> set[EpisodeId]:
    return {line.episode for line in reader.index() if line.rollout_id == rollout_id}


async def _inspect_alone(fs: FileSystem, offload: Offload, path: PurePath, limit: int) -> InspectDocument:
    """A checkpoint without its run: copied elsewhere, or written by another controller."""
    directory = CheckpointDirectory(fs, offload, path.parent)
    listed = next((entry for entry in await directory.listing() if entry.checkpoint_id == path.name), None)
    published = listed.published if listed else None
    episodes = await list_episodes(fs, offload, path, published.collection if published else None)
    view = CheckpointView(
        checkpoint_id=path.name,
        sequence=0,
        created_at=0.0,
        valid=True,
        episodes=sum(episode.restart is None for episode in episodes),
        restarts=sum(episode.restart is not None for episode in episodes),
        bytes=sum(episode.bytes for episode in episodes),
    )
    if listed is not None and listed.state != "unpublished":
        valid = published is not None and not await directory.verify(published, quick=True)
        view = _view(listed, valid=valid)
    return InspectDocument(
        run_id=published.collection.run_id if published else None,
        planned=None,
        succeeded=None,
        failed=None,
        omitted=None,
        unresolved=None,
        checkpoints=[view],
        checkpoint_id=path.name,
        episodes=episodes[:limit],
        truncated=len(episodes) > limit,
    )


def _view(listed: Listed, *, valid: bool) -> CheckpointView:
    published = listed.published
    if published is None:
        return CheckpointView(
            checkpoint_id=listed.checkpoint_id,
            sequence=_sequence(listed.checkpoint_id),
            created_at=0.0,
            valid=False,
            episodes=0,
            restarts=0,
            bytes=0,
        )
    collection = published.collection
    return CheckpointView(
        checkpoint_id=collection.checkpoint_id,
        sequence=collection.sequence,
        created_at=collection.created_at,
        valid=valid,
        episodes=len(collection.continued),
        restarts=len(collection.restarted),
        bytes=published.size_bytes,
        name=collection.name,
    )


def _sequence(checkpoint_id: str) -> int:
    try:
        return checkpoint_sequence(checkpoint_id)
    except UsageError:
        return 0
