"""What each participant committed, as the check of the cut wants it.

Our own participants say in their commit replies what each boundary needs. Gym's do not: for them the records are read
back, and the needs follow from the step that the boundary names.
"""

from collections.abc import Mapping
from pathlib import PurePath

from gymckpt.coordination import Committed, Deployment, ParticipantName, ParticipantRef
from gymckpt.errors import InvalidRolloutId, ServerError
from gymckpt.identity import EpisodeId, Kind
from gymckpt.ports import FileSystem, Offload
from gymckpt.storage.reader import ParticipantReader
from gymckpt.storage.records import Needs, Record
from gymckpt.wire.control import CommitReply

BOUNDARY_KINDS: frozenset[Kind] = frozenset({"environment", "agent"})
"""Kinds whose records have boundaries."""


async def read_committed(
    deployment: Deployment,
    replies: Mapping[ParticipantName, CommitReply],
    directory: PurePath,
    fs: FileSystem,
    offload: Offload,
) -> dict[ParticipantName, Committed]:
    """The answers of every participant to one commit into `directory`.

    Raises `ServerError` for an answer that names no episodes, `DamagedState` for records that cannot be read back.
    """
    episodes = {p.name: _episodes(p, replies[p.name].episode_ids) for p in deployment.participants}
    committed: dict[ParticipantName, Committed] = {}
    for participant in deployment.participants:
        name, reply = participant.name, replies[participant.name]
        needs: dict[EpisodeId, Needs | None] = {}
        if participant.kind in BOUNDARY_KINDS:
            if reply.needs_by_episode is not None:
                said = reply.needs_by_episode
                keys = dict(zip(_episodes(participant, list(said)), said.values(), strict=True))
                needs = {episode: None if told is None else tuple(told) for episode, told in keys.items()}
            if unsaid := [episode for episode in episodes[name] if episode not in needs]:
                needs |= await _needs_in_records(participant, unsaid, episodes, directory, fs, offload)
        committed[name] = Committed(frozenset(episodes[name]), needs)
    return committed


def _episodes(participant: ParticipantRef, keys: list[str]) -> list[EpisodeId]:
    try:
        return [EpisodeId.parse(key) for key in keys]
    except InvalidRolloutId as error:
        raise ServerError(f"commit on {participant} answered with a strange episode: {error.detail}") from error


async def _needs_in_records(
    participant: ParticipantRef,
    unsaid: list[EpisodeId],
    held: Mapping[ParticipantName, list[EpisodeId]],
    directory: PurePath,
    fs: FileSystem,
    offload: Offload,
) -> dict[EpisodeId, Needs | None]:
    part = directory / "gym" / participant.kind / participant.instance
    reader = ParticipantReader(fs, offload, part, kind=participant.kind, instance=participant.instance)
    await reader.open()
    holders = {name: frozenset(episodes) for name, episodes in held.items()}
    found: dict[EpisodeId, Needs | None] = {}
    async for stored in reader.records({episode.rollout_id: episode.attempt for episode in unsaid}):
        found[stored.episode] = (
            stored.needs
            if stored.needs is not None
            else needs_of_record(participant.kind, stored.record, stored.episode, holders)
        )
    return found


def needs_of_record(
    kind: Kind, record: Record, episode: EpisodeId, holders: Mapping[ParticipantName, frozenset[EpisodeId]]
) -> Needs | None:
    """What a record of Gym's needs; None = it has no boundary.

    The record does not name instances. Of each kind that the remaining steps call, all participants that hold the
    episode are needed, and if none does, one that should.
    """
    boundary = record.get("boundary")
    if not boundary:
        return None
    if kind != "environment":
        return ()
    step = str(boundary.get("step", "")) if isinstance(boundary, dict) else ""
    needs: list[ParticipantName] = []
    for called in _called_from(step):
        of_kind = [name for name in holders if name[0] == called]
        holding = [name for name in of_kind if episode in holders[name]]
        needs += holding or of_kind[:1]
    return tuple(needs)


def _called_from(step: str) -> tuple[Kind, ...]:
    if step.startswith("return"):
        return ()
    if step.startswith("verify"):
        return ("resources",)
    return ("agent", "resources")
