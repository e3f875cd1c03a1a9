"""Keeps an eye on the servers: waits for one that is gone, and notices one that was started again."""

import asyncio
from collections.abc import Mapping

from pydantic import SecretStr

from gymckpt import coordination
from gymckpt.collection.gate import Gate
from gymckpt.coordination import Deployment, ParticipantRef
from gymckpt.errors import GymckptError, ServerError, Unauthorized
from gymckpt.ports import Clock, Deadline, ServerRef, Transport

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 10.0


class Watch:
    """Liveness and boot ids of one deployment."""

    def __init__(
        self,
        servers: Mapping[str, ServerRef],
        transport: Transport,
        token: SecretStr | None,
        clock: Clock,
        gate: Gate,
        *,
        control_timeout_s: float,
        patience_s: float,
    ) -> None:
        self.deployment = Deployment(())
        """Replaced by the collector after a recovery."""
        self._servers = servers
        self._transport = transport
        self._token = token
        self._clock = clock
        self._gate = gate
        self._control_timeout_s = control_timeout_s
        self._patience_s = patience_s
        self._waits: dict[str, asyncio.Task[None]] = {}
        self._begun = 0
        self._look: tuple[int, asyncio.Task[tuple[ParticipantRef, ...]]] | None = None

    async def answering(self, instance: str) -> None:
        """Return once the server answers; dispatch stands still and says its name meanwhile.

        Raises `ServerError` when it has been gone for longer than our patience.
        """
        wait = self._waits.get(instance)
        if wait is None:
            wait = asyncio.create_task(self._until_answering(self._servers[instance]))
            self._waits[instance] = wait
            wait.add_done_callback(lambda _: self._waits.pop(instance, None))
        await asyncio.shield(wait)

    async def look_at(self, instance: str) -> bool:
        """Ask a server for a sign of life. True if there was none: then it returns as `answering` does."""
        limit = Deadline.after(self._clock, PROBE_TIMEOUT_S)
        try:
            await self._transport.call(self._servers[instance], "GET", "/", deadline=limit)
        except ServerError:
            await self.answering(instance)
            return True
        return False

    async def _until_answering(self, server: ServerRef) -> None:
        gone_s = self._clock.monotonic()
        with self._gate.closed(f"{server.instance} does not answer"):
            while True:
                try:
                    await self._transport.call(
                        server, "GET", "/", deadline=Deadline.after(self._clock, PROBE_TIMEOUT_S)
                    )
                    return
                except ServerError as error:
                    if self._clock.monotonic() - gone_s > self._patience_s:
                        raise _gone(server, self._patience_s, error) from error
                await self._clock.sleep_until(self._clock.monotonic() + PROBE_EVERY_S)

    async def rebooted(self) -> tuple[ParticipantRef, ...]:
        """The participants that were started again, from statuses read after this call began. Waits for those that do
        not answer; raises `ServerError` when patience ends."""
        wanted = self._begun + 1
        while self._look is not None and self._look[0] < wanted:
            # A look that is under way may have read a boot id before what made the caller ask.
            await asyncio.wait([self._look[1]])
        if self._look is None:
            self._begun += 1
            task = asyncio.create_task(self._read())
            self._look = (self._begun, task)
            task.add_done_callback(self._looked)
        return await asyncio.shield(self._look[1])

    def _looked(self, task: "asyncio.Task[tuple[ParticipantRef, ...]]") -> None:
        self._look = None
        if not task.cancelled():
            task.exception()

    async def _read(self) -> tuple[ParticipantRef, ...]:
        begun_s = self._clock.monotonic()
        while True:
            deployment = self.deployment
            limit = Deadline.after(self._clock, self._control_timeout_s)
            answers = await coordination.statuses(deployment, self._transport, self._token, limit)
            for failure in answers.failures:
                if isinstance(failure.error, Unauthorized):
                    raise failure.error
            if not answers.failures:
                return deployment.rebooted(answers.replies)
            for failure in answers.failures:
                server = failure.participant.server
                if self._clock.monotonic() - begun_s > self._patience_s:
                    raise _gone(server, self._patience_s, failure.error) from failure.error
                await self.answering(server.instance)
            await self._clock.sleep_until(self._clock.monotonic() + PROBE_EVERY_S)


def _gone(server: ServerRef, patience_s: float, error: GymckptError) -> ServerError:
    return ServerError(
        f"{server.instance} ({server.url}) has not answered for {patience_s:g} s: {error.detail}",
        hint="start it again, then resume the run",
    )
