"""Retires attempts on every participant, in batches, never while a checkpoint is open, until it has succeeded."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from pydantic import SecretStr

from gymckpt import coordination
from gymckpt.collection.events import Event, Retired, RetirePending
from gymckpt.coordination import Deployment
from gymckpt.errors import GymckptError, NotAsAsked
from gymckpt.identity import EpisodeId
from gymckpt.ports import Clock, Deadline, Transport

GATHER_S = 0.02
"""How long a batch waits for company."""
CLEAR_AFTER_S = 2.0
CLEAR_BATCH = 64
AGAIN_AFTER_S = (0.5, 1.0, 2.0, 5.0, 10.0)


class Retirer:
    """Two kinds of work. `retire`: somebody waits for it, because the rollout's next attempt may only go out then.
    `clear`: the rollout has ended; it is retired and forgotten some seconds later, and nobody waits."""

    def __init__(
        self,
        transport: Transport,
        token: SecretStr | None,
        clock: Clock,
        record: Callable[[Event], Awaitable[None]],
        check_epoch: Callable[[], Awaitable[None]],
        control: asyncio.Lock,
        timeout_s: float,
    ) -> None:
        self.deployment = Deployment(())
        """Replaced by the collector after a recovery."""
        self._transport = transport
        self._token = token
        self._clock = clock
        self._record = record
        self._check_epoch = check_epoch
        self._control = control
        self._timeout_s = timeout_s
        self._wanted: dict[EpisodeId, asyncio.Future[None]] = {}
        self._ended: dict[str, EpisodeId] = {}
        self._oldest_s = 0.0
        self._wake = asyncio.Event()

    @property
    def pending(self) -> int:
        """Attempts that somebody waits for."""
        return len(self._wanted)

    async def retire(self, episode: EpisodeId) -> None:
        """Return once the attempt is retired everywhere. Servers without the control plane count as retired."""
        if not self.deployment.participants:
            return
        future = self._wanted.get(episode)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._wanted[episode] = future
            self._wake.set()
        await asyncio.shield(future)

    def clear(self, episode: EpisodeId) -> None:
        """The rollout has ended: free what servers hold of it, in time."""
        if not self.deployment.participants:
            return
        if not self._ended:
            self._oldest_s = self._clock.monotonic()
        self._ended[episode.rollout_id] = episode
        if len(self._ended) >= CLEAR_BATCH:
            self._wake.set()

    def drop(self) -> None:
        """Forget all wanted work: a recovery does it anew."""
        for future in self._wanted.values():
            future.cancel()
        self._wanted.clear()

    async def serve(self) -> None:
        """Work until cancelled. Raises errors of the journal and `NotAsAsked` once the lock is lost."""
        failures = 0
        while True:
            await self._wait_for_work(failures)
            try:
                async with self._control:
                    await self._batch()
                    await self._clear_due()
                failures = 0
            except NotAsAsked:
                raise
            except _NotRetired:
                failures += 1

    async def _wait_for_work(self, failures: int) -> None:
        if failures:
            pause_s = AGAIN_AFTER_S[min(failures, len(AGAIN_AFTER_S)) - 1]
            await self._clock.sleep_until(self._clock.monotonic() + pause_s)
        elif not self._wanted and len(self._ended) < CLEAR_BATCH:
            self._wake.clear()
            try:
                async with asyncio.timeout(CLEAR_AFTER_S):
                    await self._wake.wait()
            except TimeoutError:
                return
        if not failures:
            await self._clock.sleep_until(self._clock.monotonic() + GATHER_S)

    async def _batch(self) -> None:
        episodes = tuple(self._wanted)
        if not episodes:
            return
        await self._check_epoch()
        await self._record(RetirePending(episodes))
        await self._retire_all(episodes)
        await self._record(Retired(episodes))
        for episode in episodes:
            if (future := self._wanted.pop(episode, None)) is not None and not future.done():
                future.set_result(None)

    async def _clear_due(self) -> None:
        due = self._clock.monotonic() - self._oldest_s >= CLEAR_AFTER_S or len(self._ended) >= CLEAR_BATCH
        if self._ended and due:
            await self.clear_now()

    async def clear_now(self) -> None:
        """Retire and forget every ended rollout; the caller holds the control lock. Raises `GymckptError`."""
        episodes = tuple(self._ended.values())
        if not episodes:
            return
        await self._check_epoch()
        await self._retire_all(episodes)
        answers = await coordination.forget(
            self.deployment,
            self._transport,
            self._token,
            _action(),
            self._deadline(),
            rollout_ids=[episode.rollout_id for episode in episodes],
        )
        if (error := coordination.failed(answers, "cannot let finished rollouts be forgotten")) is not None:
            raise _NotRetired(error.detail)
        await self._record(Retired(episodes, forgotten=True))
        for episode in episodes:
            if self._ended.get(episode.rollout_id) == episode:
                del self._ended[episode.rollout_id]

    async def _retire_all(self, episodes: tuple[EpisodeId, ...]) -> None:
        answers = await coordination.retire(
            self.deployment, self._transport, self._token, _action(), self._deadline(), episodes=episodes
        )
        if (error := coordination.failed(answers, "cannot retire")) is not None:
            raise _NotRetired(error.detail)

    def _deadline(self) -> Deadline:
        return Deadline.after(self._clock, self._timeout_s)


class _NotRetired(GymckptError):
    """A participant did not answer: it is tried again."""


def _action() -> str:
    """A retire outside a checkpoint closes nothing, so its name needs no place in the journal."""
    return f"retire-{secrets.token_hex(8)}"
