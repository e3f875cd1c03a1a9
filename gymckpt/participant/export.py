"""One commit's way from the role to a manifest on disk: exported once, written until it is there or stopped."""

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from gymckpt.errors import CheckpointFailed, ControlError, GymckptError, InvalidCheckpointState
from gymckpt.identity import EpisodeId, Kind
from gymckpt.participant.points import COMMIT_AFTER_EXPORT, COMMIT_AFTER_MANIFEST, COMMIT_BEFORE_EXPORT, pass_point
from gymckpt.participant.role import Role
from gymckpt.ports import FileSystem, Offload
from gymckpt.settings import CheckpointSettings
from gymckpt.storage.base import Base
from gymckpt.storage.records import ExportedRecord
from gymckpt.storage.scope import OWNERS
from gymckpt.storage.writer import ParticipantWriter, Written


class Export:
    """What one commit exports, and its writer.

    A call of `run` that fails can be repeated: once the export is complete, only the write is tried again, with the
    very same bytes. An export that broke off in the middle has written nothing that counts, and begins anew.
    """

    def __init__(
        self,
        role: Role,
        settings: CheckpointSettings,
        fs: FileSystem,
        offload: Offload,
        *,
        checkpoint_id: str,
        directory: Path,
        scope: frozenset[EpisodeId] | None,
        base: Base | None,
    ) -> None:
        self._role = role
        self._settings = settings
        self._fs = fs
        self._offload = offload
        self._checkpoint_id = checkpoint_id
        self._directory = directory
        self._scope = scope
        self._base = base
        self._writer: ParticipantWriter | None = None
        self._complete = False
        self._stopped = False
        self.episodes: list[EpisodeId] = []
        self.needs: dict[str, list[tuple[Kind, str]] | None] = {}
        self.fields: Mapping[str, Any] = {}
        """The reply fields of this kind, taken when the export was complete."""

    async def run(self) -> Written:
        """Export and write. Raises `InvalidCheckpointState` when the directory cannot be written."""
        try:
            if not self._complete:
                await self._export()
            assert self._writer is not None
            written = await self._writer.finish()
        except ControlError:
            raise
        except OSError as error:
            raise InvalidCheckpointState(f"cannot write {self._directory}: {error.strerror or error}") from error
        except GymckptError as error:
            raise InvalidCheckpointState(error.detail, hint=error.hint) from error
        await pass_point(self._offload, COMMIT_AFTER_MANIFEST)
        return written

    async def stop(self) -> None:
        """After this, nothing of it can ever appear under a final name."""
        self._stopped = True
        if self._writer is not None:
            await self._offload.run(self._writer.stop)

    async def discard(self) -> None:
        """Remove what the stopped write has left under temporary names. Waits for what is being written."""
        if self._writer is not None:
            await self._writer.discard()

    async def _export(self) -> None:
        await self.discard()
        if self._stopped:
            raise CheckpointFailed(f"the write of {self._checkpoint_id} was stopped")
        self._writer = ParticipantWriter(
            self._fs,
            self._offload,
            self._directory,
            checkpoint_id=self._checkpoint_id,
            kind=self._role.kind,
            instance=self._role.instance,
            base=self._base,
            max_record_bytes=self._settings.max_record_bytes,
            compression_level=self._settings.compression_level,
        )
        self.episodes, self.needs = [], {}
        await pass_point(self._offload, COMMIT_BEFORE_EXPORT)
        records = self._role.export(self._scope)
        try:
            async for record in records:
                if self._wanted(record.episode):
                    await self._writer.add(record)
                    self._note(record)
        finally:
            if isinstance(records, AsyncGenerator):
                await records.aclose()
        self.fields = self._role.commit_fields(self.episodes)
        self._complete = True
        await pass_point(self._offload, COMMIT_AFTER_EXPORT)

    def _wanted(self, episode: EpisodeId) -> bool:
        """What a failed retire has left is refused, and no part of a checkpoint."""
        return (self._scope is None or episode in self._scope) and not self._role.marks.refuses(episode)

    def _note(self, record: ExportedRecord) -> None:
        self.episodes.append(record.episode)
        if self._role.kind in OWNERS:
            if record.boundary is None:
                self.needs[record.episode.capture_key] = None
            elif record.needs is not None:
                self.needs[record.episode.capture_key] = list(record.needs)
