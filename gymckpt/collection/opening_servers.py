"""Opens the servers after each checkpoint, and what stayed closed until it is open."""

import asyncio
import logging

from pydantic import SecretStr

from gymckpt import coordination
from gymckpt.coordination import Deployment
from gymckpt.errors import NotSent
from gymckpt.ports import Clock, Deadline, Transport

logger = logging.getLogger(__name__)


class ServerOpener:
    """Resumes checkpoints on a deployment. One call at a time."""

    def __init__(self, transport: Transport, token: SecretStr | None, clock: Clock, timeout_s: float) -> None:
        self._transport = transport
        self._token = token
        self._clock = clock
        self._timeout_s = timeout_s
        self._closed: set[str] = set()

    @property
    def closed_after(self) -> str:
        """Checkpoints after which not every server has opened again, as far as is known; empty for none."""
        return ", ".join(sorted(self._closed))

    async def open(
        self, deployment: Deployment, checkpoint_id: str, limit: Deadline, last_s: float | None
    ) -> tuple[str, ...]:
        """Resume `checkpoint_id`; what went wrong, for a person. Who has not answered after `last_s` (None: `limit`
        counts) is given up for now."""
        resuming = coordination.resume(deployment, self._transport, self._token, checkpoint_id, limit)
        try:
            async with asyncio.timeout(last_s):
                answers = await resuming
        except TimeoutError:
            told = f"not every server opened again after {checkpoint_id}: each does when its lease ends"
            logger.warning("%s", told)
            self._closed.add(checkpoint_id)
            return (told,)
        for failure in answers.failures:
            gone = isinstance(failure.error, NotSent)
            closed = (
                "is not there, and open once it is started again" if gone else "may stay closed until its lease ends"
            )
            logger.warning("%s %s: %s", failure.participant, closed, failure.error.detail)
            self._closed.add(checkpoint_id)
        return tuple(failure.error.detail for failure in answers.failures)

    async def open_again(self, deployment: Deployment, deadline: Deadline | None = None) -> bool:
        """Open what could not be opened after its checkpoint; whether nothing of ours is closed any more."""
        # Twice: where two ids hold different servers, each is refused by the servers of the other at first.
        for checkpoint_id in [*self._closed, *self._closed]:
            if checkpoint_id not in self._closed:
                continue
            limit = deadline.earliest(self._timeout_s) if deadline else Deadline.after(self._clock, self._timeout_s)
            answers = await coordination.resume(deployment, self._transport, self._token, checkpoint_id, limit)
            if not answers.failures:
                self._closed.discard(checkpoint_id)
        return not self._closed
