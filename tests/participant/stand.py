"""One participant on a stand: a role, virtual time, real files, and short ways to say what a controller says."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import SecretStr

from gymckpt.errors import ControlError
from gymckpt.identity import EpisodeId
from gymckpt.participant.participant import Participant
from gymckpt.ports import FileSystem, Offload
from gymckpt.settings import CheckpointSettings
from gymckpt.storage.files import LocalFileSystem
from gymckpt.storage.reader import ParticipantReader
from gymckpt.wire.control import (
    CommitReply,
    CommitRequest,
    EpisodeRef,
    ForgetReply,
    ForgetRequest,
    Operation,
    PrepareReply,
    RenewReply,
    RestoreReply,
    RestoreRequest,
    ResumeReply,
    RetireReply,
    RetireRequest,
)
from tests.participant.roles import CounterRole
from tests.simulation.clock import InlineOffload, VirtualClock, run_virtual

T = TypeVar("T")

GRACE_S = 60.0
X, Y, Z = "ckpt-000001-0000000a", "ckpt-000002-0000000b", "ckpt-000003-0000000c"
A, B, C = EpisodeId("a"), EpisodeId("b"), EpisodeId("c")


class Stand:
    """A participant and its controller's voice. `seconds` is the time from now to the deadline."""

    def __init__(
        self,
        root: Path,
        role: CounterRole | None = None,
        *,
        fs: FileSystem | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.root = root
        self.role = role or CounterRole()
        self.clock = VirtualClock()
        settings = CheckpointSettings(
            enabled=True, control_auth_token=SecretStr("secret"), lease_grace_seconds=GRACE_S, root=root
        )
        self.participant = Participant(
            self.role,
            settings,
            clock=self.clock,
            fs=fs or LocalFileSystem(),
            offload=offload or InlineOffload(),
            boot_id="boot",
        )

    def directory(self, checkpoint_id: str) -> str:
        return str(self.root / checkpoint_id)

    def manifests(self) -> list[Path]:
        return sorted(self.root.rglob("manifest.json"))

    def operation(self, checkpoint_id: str, seconds: float = 30.0) -> Operation:
        return Operation(checkpoint_id=checkpoint_id, deadline_ts=self.clock.time() + seconds)

    async def prepare(self, checkpoint_id: str, seconds: float = 30.0) -> PrepareReply:
        return await self.participant.prepare(self.operation(checkpoint_id, seconds))

    async def renew(self, checkpoint_id: str, seconds: float = 30.0) -> RenewReply:
        return await self.participant.renew(self.operation(checkpoint_id, seconds))

    async def resume(self, checkpoint_id: str, seconds: float = 30.0) -> ResumeReply:
        return await self.participant.resume(self.operation(checkpoint_id, seconds))

    async def commit(
        self,
        checkpoint_id: str,
        scope: Iterable[EpisodeId] | None = None,
        *,
        seconds: float = 30.0,
        stop: bool = False,
        directory: str | None = None,
    ) -> CommitReply:
        return await self.participant.commit(
            CommitRequest(
                checkpoint_id=checkpoint_id,
                deadline_ts=self.clock.time() + seconds,
                checkpoint_dir=directory or self.directory(checkpoint_id),
                episode_ids=None if scope is None else [EpisodeRef.of(episode) for episode in scope],
                stop=stop,
            )
        )

    async def restore(
        self, checkpoint_id: str, source: str, named: Iterable[EpisodeId], *, seconds: float = 30.0
    ) -> RestoreReply:
        return await self.participant.restore(
            RestoreRequest(
                checkpoint_id=checkpoint_id,
                deadline_ts=self.clock.time() + seconds,
                checkpoint_dir=source if source.startswith("/") else self.directory(source),
                episode_ids=[EpisodeRef.of(episode) for episode in named],
            )
        )

    async def retire(self, checkpoint_id: str, *episodes: EpisodeId, seconds: float = 30.0) -> RetireReply:
        return await self.participant.retire(
            RetireRequest(
                checkpoint_id=checkpoint_id,
                deadline_ts=self.clock.time() + seconds,
                episode_ids=[EpisodeRef.of(episode) for episode in episodes],
            )
        )

    async def forget(self, checkpoint_id: str, *rollout_ids: str, seconds: float = 30.0) -> ForgetReply:
        return await self.participant.forget(
            ForgetRequest(
                checkpoint_id=checkpoint_id, deadline_ts=self.clock.time() + seconds, rollout_ids=list(rollout_ids)
            )
        )

    async def checkpoint(self, checkpoint_id: str, scope: Iterable[EpisodeId] | None = None) -> CommitReply:
        """Prepare, commit, resume."""
        assert (await self.prepare(checkpoint_id)).phase == "prepared"
        reply = await self.commit(checkpoint_id, scope)
        await self.resume(checkpoint_id)
        return reply

    def temporaries(self) -> list[Path]:
        return [path for path in self.root.rglob("*") if path.is_file() and path.name.startswith(".")]

    def is_open(self) -> bool:
        return self.participant.phase == "idle" and self.role.gate.is_open


async def refused(code: str, operation: Awaitable[object]) -> ControlError:
    """The refusal with `code` that `operation` must end with."""
    with pytest.raises(ControlError) as caught:
        await operation
    assert caught.value.code == code, f"{caught.value.code}: {caught.value.detail}"
    return caught.value


def virtually(test: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `test` in virtual time."""
    return run_virtual(test())


async def started(stand: Stand, *episodes: EpisodeId, bumps: int = 2) -> None:
    """Episodes that live on the stand and have been bumped."""
    for episode in episodes:
        stand.role.start(episode)
        for _ in range(bumps):
            await stand.role.bump(episode)


async def soon() -> None:
    """Let everything that is ready take some steps; no time passes."""
    for _ in range(20):
        await asyncio.sleep(0)


async def written(stand: Stand, checkpoint_id: str) -> dict[str, list[int]]:
    """Capture key -> history, as a reader finds it."""
    role = stand.role
    directory = Path(stand.directory(checkpoint_id)) / "gym" / role.kind / role.instance
    reader = ParticipantReader(
        LocalFileSystem(),
        InlineOffload(),
        directory,
        kind=role.kind,
        instance=role.instance,
        max_record_bytes=1 << 20,
    )
    await reader.open()
    assert await reader.verify() == []
    return {stored.episode.capture_key: stored.record["history"] async for stored in reader.records(None)}


async def stored(root: Path, *episodes: EpisodeId) -> None:
    """Checkpoint X with `episodes`, each bumped twice."""
    stand = Stand(root)
    await started(stand, *episodes)
    await stand.checkpoint(X)
