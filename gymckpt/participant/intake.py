"""A restore's way from a checkpoint directory to records that the role has checked. Changes nothing in the role."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gymckpt.errors import ControlError, GymckptError, InvalidCheckpointState
from gymckpt.identity import EpisodeId
from gymckpt.participant.role import Installable, Role
from gymckpt.ports import FileSystem, Offload
from gymckpt.settings import CheckpointSettings
from gymckpt.storage.base import Base
from gymckpt.storage.reader import ParticipantReader
from gymckpt.storage.records import StoredRecord


@dataclass(frozen=True, slots=True)
class Intake:
    """Records that were read, checked, and can be installed."""

    installable: Installable
    attempts: Mapping[str, int]
    """The attempt that each rollout with a record goes on as."""
    source_checkpoint_id: str
    base: Base

    @property
    def episodes(self) -> list[EpisodeId]:
        """The new attempts, in the order of the checkpoint."""
        return [EpisodeId(rollout_id, attempt) for rollout_id, attempt in self.attempts.items()]


async def take_in(
    role: Role,
    settings: CheckpointSettings,
    fs: FileSystem,
    offload: Offload,
    directory: Path,
    named: Mapping[str, int],
) -> Intake:
    """Stream the records of the rollouts in `named` (of attempts not above the named ones) through the role's checks.

    Raises `InvalidCheckpointState` for a directory that is missing, damaged, another participant's, or unreadable.
    """
    reader = ParticipantReader(
        fs,
        offload,
        directory,
        kind=role.kind,
        instance=role.instance,
        max_record_bytes=settings.max_record_bytes,
    )
    attempts: dict[str, int] = {}

    async def in_scope() -> AsyncIterator[StoredRecord]:
        async for record in reader.records(named):
            rollout_id = record.episode.rollout_id
            if rollout_id in attempts:
                raise InvalidCheckpointState(f"{directory} holds two records of rollout {rollout_id}")
            attempts[rollout_id] = named[rollout_id] + 1
            yield record

    try:
        await reader.open()
        installable = await role.validate(in_scope())
        base = await offload.run(lambda: reader.base(attempts))
        return Intake(installable, attempts, reader.checkpoint_id, base)
    except ControlError:
        raise
    except OSError as error:
        raise InvalidCheckpointState(f"cannot read {directory}: {error.strerror or error}") from error
    except GymckptError as error:
        raise InvalidCheckpointState(error.detail, hint=error.hint) from error
