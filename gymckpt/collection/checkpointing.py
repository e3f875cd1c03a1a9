"""Takes a checkpoint of a running collection: close, write, check the cut, publish, open. One at a time.

Whatever happens, every participant is resumed, what is published is whole, and the checkpoint before stands.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import SecretStr

from gymckpt import coordination
from gymckpt.collection import events
from gymckpt.collection.blockers import BlockerMemory
from gymckpt.collection.committed import read_committed
from gymckpt.collection.host import CheckpointHost
from gymckpt.collection.leases import renewing
from gymckpt.collection.opening_servers import ServerOpener
from gymckpt.collection.unpublished import Unpublished
from gymckpt.coordination import NO_PATH_MAP, Cut, Deployment, ParticipantName, ParticipantRef, PathMap, Prepared
from gymckpt.crashpoints import crash_point, declare
from gymckpt.errors import CheckpointFailed, GymckptError, NotAsAsked, ServerError
from gymckpt.identity import EpisodeId, checkpoint_sequence
from gymckpt.ports import Clock, Deadline, FileSystem, Offload, Transport
from gymckpt.storage.checkpoints import CheckpointDirectory, Collection, PublishedCheckpoint, Restarted
from gymckpt.wire.control import CommitReply

logger = logging.getLogger(__name__)

T = TypeVar("T")

PREPARE_BEGUN = declare("collector.prepare.begun", "the checkpoint's id is durable, no server knows of it")
PREPARE_DONE = declare("collector.prepare.done", "every participant is prepared")
COMMIT_SENT = declare("collector.commit.sent", "commits are on their way")
COMMIT_DONE = declare("collector.commit.done", "every participant has written its part")
PUBLISH_BEFORE = declare("collector.publish.before", "the cut is checked, nothing is published")
PUBLISH_AFTER = declare("collector.publish.after", "the checkpoint is published, the servers are closed")
RESUME_BEFORE = declare("collector.resume.before", "just before the servers are opened")
RESUME_AFTER = declare("collector.resume.after", "the servers are open, the journal does not say so yet")

RESUME_AT_LEAST_S = 5.0
LAST_RESUME_S = 2.0
"""For opening the servers after a checkpoint with a deadline, once that has passed: who has not answered by then opens
when its lease ends."""


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Time limits of a checkpoint."""

    prepare_timeout_s: float = 30.0
    commit_timeout_s: float = 600.0
    control_timeout_s: float = 30.0
    """For renew, resume and status, and for the reply of an episode that ended at the cut."""
    path_map: PathMap = NO_PATH_MAP


@dataclass(frozen=True, slots=True)
class CheckpointTaken:
    """A checkpoint that stands."""

    checkpoint_id: str
    episodes: int
    restarts: int
    """Episodes that it lists as restarted, whatever the reason."""
    size_bytes: int
    pause_s: float
    """How long admission was closed anywhere."""
    commit_s: float
    published: PublishedCheckpoint
    warnings: tuple[str, ...] = ()
    """Participants that could not be resumed: they open themselves when their lease ends."""


@dataclass(frozen=True, slots=True)
class CheckpointNotTaken:
    """Nothing was published and the run goes on."""

    checkpoint_id: str | None
    """None: it was not even begun."""
    reason: str
    blockers: tuple[str, ...] = ()
    """What kept participants from being ready, as they named it."""
    retire: EpisodeId | None = None
    """Retire this attempt: alone, it keeps checkpoints from being taken. Asked for at most once a rollout."""
    rebooted: tuple[ParticipantRef, ...] = ()
    """Participants that were started again while it was open: what they held is void."""


@dataclass
class _Opened:
    """What is known of the checkpoint under way."""

    checkpoint_id: str
    begun_s: float
    deadline: Deadline | None = None
    """By when everything must be over, if there is such a moment."""
    prepared: Prepared | None = None
    published: PublishedCheckpoint | None = None
    commit_s: float = 0.0
    cut: Cut = field(default_factory=lambda: Cut((), (), ()))


class Checkpointer:
    """Takes checkpoints for one run. `deployment` is replaced by the collector after a recovery."""

    def __init__(
        self,
        deployment: Deployment,
        transport: Transport,
        token: SecretStr | None,
        directory: CheckpointDirectory,
        host: CheckpointHost,
        settings: CheckpointSettings,
        clock: Clock,
        *,
        fs: FileSystem,
        offload: Offload,
    ) -> None:
        self.deployment = deployment
        self._transport = transport
        self._token = token
        self._directory = directory
        self._host = host
        self._settings = settings
        self._clock = clock
        self._fs = fs
        self._offload = offload
        self._blockers = BlockerMemory()
        self._unpublished = Unpublished(directory)
        self._opener = ServerOpener(transport, token, clock, settings.control_timeout_s)
        self._busy = asyncio.Lock()

    @property
    def all_resumed(self) -> bool:
        """Whether every server has opened again after every checkpoint, as far as is known."""
        return not self._opener.closed_after

    async def take(
        self, *, stop: bool = False, name: str | None = None, deadline: Deadline | None = None
    ) -> CheckpointTaken | CheckpointNotTaken:
        """Take one checkpoint, by `deadline` if given. `stop`: the servers' work ends with it. `name`: never pruned.

        Raises only what stops the run: `NotAsAsked` once the lock is lost, the errors of the host's own journal, and
        cancellation; even then every participant is resumed first.
        """
        async with self._busy:
            if not stop and (culprit := self._blockers.in_the_way(self._host.in_flight())) is not None:
                return CheckpointNotTaken(None, f"{culprit} keeps blocking checkpoints", (culprit.capture_key,))
            if not self.deployment.participants:
                return CheckpointNotTaken(None, "no server takes part in checkpoints")
            if not await self._opener.open_again(self.deployment, deadline):
                left = self._opener.closed_after
                return CheckpointNotTaken(None, f"not every server has opened again after {left}")
            opened = _Opened(await self._host.begin_checkpoint(), self._clock.monotonic(), deadline)
            return await self._take(opened, stop, name)

    async def _take(self, opened: _Opened, stop: bool, name: str | None) -> CheckpointTaken | CheckpointNotTaken:
        failure: GymckptError | OSError | None = None
        try:
            crash_point(PREPARE_BEGUN)
            await self._until_published(opened, stop, name)
        except (GymckptError, OSError) as error:
            failure = error
        except BaseException:
            await _to_its_end(self._give_up(opened))
            raise
        warnings = await _to_its_end(self._resume(opened))
        pause_s = self._clock.monotonic() - opened.begun_s
        if isinstance(failure, NotAsAsked):
            raise failure
        if opened.published is not None:
            return await self._taken(opened, opened.published, pause_s, warnings)
        if failure is not None:
            return await self._failed(opened, failure)
        assert opened.prepared is not None
        return await self._missed(opened, opened.prepared)

    async def _until_published(self, opened: _Opened, stop: bool, name: str | None) -> None:
        """Come as far as `opened.published`, or stop where a participant was not ready."""
        prepared = await coordination.prepare(
            self.deployment,
            self._transport,
            self._token,
            opened.checkpoint_id,
            self._limit(self._settings.prepare_timeout_s, opened),
        )
        opened.prepared = prepared
        if not prepared.ready:
            return
        crash_point(PREPARE_DONE)
        await self._directory.begin(opened.checkpoint_id)
        owners, restarts = self._scope(prepared)
        limit = self._limit(self._settings.commit_timeout_s, opened)
        replies = await self._commit(opened, frozenset(owners), stop, limit)
        crash_point(COMMIT_DONE)
        boots = asyncio.create_task(self._rebooted(opened))
        try:
            async with renewing(
                self.deployment,
                self._transport,
                self._token,
                opened.checkpoint_id,
                self._limit(self._settings.control_timeout_s, opened).remaining_s,
                self._clock,
            ):
                directory = self._directory.path(opened.checkpoint_id)
                committed = await read_committed(self.deployment, replies, directory, self._fs, self._offload)
                replied = await self._wait_replies(coordination.ended_at_cut(owners, committed), limit)
                opened.cut = coordination.check_cut(
                    owners=owners, committed=committed, restarts=restarts, replied=replied
                )
                if rebooted := await boots:
                    raise ServerError(f"started again since it was found: {coordination.describe(rebooted)}")
                await self._publish(opened, name)
        finally:
            boots.cancel()

    async def _publish(self, opened: _Opened, name: str | None) -> None:
        await self._host.check_epoch()
        crash_point(PUBLISH_BEFORE)
        opened.published = await self._directory.publish(
            opened.checkpoint_id, self._collection(opened, name), expected=self.deployment.names
        )
        crash_point(PUBLISH_AFTER)

    def _limit(self, seconds: float, opened: _Opened) -> Deadline:
        after = Deadline.after(self._clock, seconds)
        return after if opened.deadline is None else opened.deadline.earliest(seconds)

    def _scope(self, prepared: Prepared) -> tuple[dict[EpisodeId, ParticipantName], dict[EpisodeId, str]]:
        """The owner of every episode in scope, and the instance that cannot capture each of the others."""
        owners: dict[EpisodeId, ParticipantName] = {}
        restarts: dict[EpisodeId, str] = {}
        for episode, instance in {**self._host.restored_unsent(), **self._host.in_flight()}.items():
            owner = self.deployment.owner(instance)
            if (reporter := prepared.restarts.get(episode)) is not None:
                restarts[episode] = reporter
            elif owner is None:
                restarts[episode] = instance
            else:
                owners[episode] = owner.name
        return owners, restarts

    async def _commit(
        self, opened: _Opened, scope: frozenset[EpisodeId], stop: bool, limit: Deadline
    ) -> Mapping[ParticipantName, CommitReply]:
        begun_s = self._clock.monotonic()
        commits = asyncio.create_task(
            coordination.commit(
                self.deployment,
                self._transport,
                self._token,
                opened.checkpoint_id,
                limit,
                checkpoint_dir=self._directory.path(opened.checkpoint_id),
                episodes=scope,
                stop=stop,
                path_map=self._settings.path_map,
            )
        )
        try:
            await asyncio.sleep(0)
            crash_point(COMMIT_SENT)
            replies = (await commits).require()
        finally:
            commits.cancel()
        opened.commit_s = self._clock.monotonic() - begun_s
        return replies

    async def _wait_replies(self, ended: tuple[EpisodeId, ...], limit: Deadline) -> frozenset[EpisodeId]:
        limit = limit.earliest(self._settings.control_timeout_s)
        came = await asyncio.gather(*(self._host.wait_reply(episode, limit) for episode in ended))
        return frozenset(episode for episode, reply in zip(ended, came, strict=True) if reply)

    async def _rebooted(self, opened: _Opened) -> tuple[ParticipantRef, ...]:
        """Those whose process is another one than the deployment knows; who does not answer is not among them."""
        limit = self._limit(self._settings.control_timeout_s, opened)
        answers = await coordination.statuses(self.deployment, self._transport, self._token, limit)
        return self.deployment.rebooted(answers.replies)

    def _collection(self, opened: _Opened, name: str | None) -> Collection:
        return Collection(
            checkpoint_id=opened.checkpoint_id,
            run_id=self._host.run_id,
            sequence=checkpoint_sequence(opened.checkpoint_id),
            epoch=self._host.epoch,
            created_at=self._clock.time(),
            continued=list(opened.cut.continued),
            restarted=[Restarted(episode, reason) for episode, reason in opened.cut.restarted],
            journals=dict(self._host.journal_positions()),
            name=name,
        )

    async def _resume(self, opened: _Opened) -> tuple[str, ...]:
        _pass_even_failing(RESUME_BEFORE)
        # Opening the servers gets its time even where the deadline has passed.
        seconds = max(RESUME_AT_LEAST_S, self._limit(self._settings.control_timeout_s, opened).remaining_s)
        limit = Deadline.after(self._clock, seconds)
        last_s = None if opened.deadline is None else max(0.0, opened.deadline.remaining_s) + LAST_RESUME_S
        told = await self._opener.open(self.deployment, opened.checkpoint_id, limit, last_s)
        _pass_even_failing(RESUME_AFTER)
        return told

    async def resume_again(self) -> bool:
        """Open what could not be opened after its checkpoint; whether nothing of ours is closed any more."""
        async with self._busy:
            return await self._opener.open_again(self.deployment)

    async def _taken(
        self, opened: _Opened, published: PublishedCheckpoint, pause_s: float, warnings: tuple[str, ...]
    ) -> CheckpointTaken:
        self._blockers.succeeded()
        taken = CheckpointTaken(
            checkpoint_id=opened.checkpoint_id,
            episodes=len(opened.cut.continued),
            restarts=len(opened.cut.restarted),
            size_bytes=published.size_bytes,
            pause_s=pause_s,
            commit_s=opened.commit_s,
            published=published,
            warnings=warnings,
        )
        await self._host.record(
            events.CheckpointPublished(
                checkpoint_id=taken.checkpoint_id,
                episodes=taken.episodes,
                restarts=taken.restarts,
                size_bytes=taken.size_bytes,
                pause_s=taken.pause_s,
                commit_s=taken.commit_s,
            )
        )
        await self._unpublished.clear()
        return taken

    async def _give_up(self, opened: _Opened) -> None:
        """We are cancelled: leave the servers open and the journal true, and ask for nothing else."""
        warnings = await self._resume(opened)
        if opened.published is not None:
            pause_s = self._clock.monotonic() - opened.begun_s
            await self._taken(opened, opened.published, pause_s, warnings)
        else:
            failure = CheckpointFailed("given up")
            await self._host.record(events.CheckpointFailed(opened.checkpoint_id, failure.detail))
            await self._unpublished.failed(opened.checkpoint_id, failure)

    async def _missed(self, opened: _Opened, prepared: Prepared) -> CheckpointNotTaken:
        retire = None if prepared.failures else self._blockers.missed(prepared.blockers)
        await self._host.record(events.CheckpointFailed(opened.checkpoint_id, prepared.reason))
        return CheckpointNotTaken(opened.checkpoint_id, prepared.reason, prepared.blockers, retire)

    async def _failed(self, opened: _Opened, failure: GymckptError | OSError) -> CheckpointNotTaken:
        reason = failure.detail if isinstance(failure, GymckptError) else str(failure)
        await self._host.record(events.CheckpointFailed(opened.checkpoint_id, reason))
        await self._unpublished.failed(opened.checkpoint_id, failure)
        return CheckpointNotTaken(opened.checkpoint_id, reason, rebooted=await self._rebooted(opened))


def _pass_even_failing(point: str) -> None:
    """A crash point on the way to opening the servers: an error there must not keep them closed."""
    try:
        crash_point(point)
    except (GymckptError, OSError) as error:
        logger.warning("%s", error)


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` even if we are cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
