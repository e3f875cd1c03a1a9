"""Keeps participants closed while the controller is still at work on what they committed."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from pydantic import SecretStr

from gymckpt import coordination
from gymckpt.coordination import Deployment, ParticipantName
from gymckpt.errors import GymckptError
from gymckpt.ports import Clock, Deadline, Transport
from gymckpt.wire.control import RenewReply

logger = logging.getLogger(__name__)

SHORTEST_PAUSE_S = 0.05


@asynccontextmanager
async def renewing(
    deployment: Deployment,
    transport: Transport,
    token: SecretStr | None,
    checkpoint_id: str,
    timeout_s: float,
    clock: Clock,
) -> AsyncIterator[None]:
    """Renew every lease at the start, and again before half of the shortest one is over, until the block ends.

    The first renewal raises if a participant does not hold the checkpoint any more: after the last commit, it proves
    that all were closed together. Later ones only warn: what is committed stays that cut, whoever opens early.
    """

    async def renew() -> float:
        limit = Deadline.after(clock, timeout_s)
        answers = await coordination.renew(deployment, transport, token, checkpoint_id, limit)
        return _shortest_s(deployment, answers.require(), clock)

    async def keep(lease_s: float) -> None:
        try:
            while True:
                await clock.sleep_until(clock.monotonic() + max(lease_s / 2, SHORTEST_PAUSE_S))
                lease_s = await renew()
        except GymckptError as error:
            logger.warning("leases of %s are not renewed any more: %s", checkpoint_id, error.detail)

    keeper = asyncio.create_task(keep(await renew()))
    try:
        yield
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper


def _shortest_s(deployment: Deployment, replies: Mapping[ParticipantName, RenewReply], clock: Clock) -> float:
    left_s = (
        replies[participant.name].lease_expires_at - participant.skew_s - clock.time()
        for participant in deployment.participants
    )
    return max(0.0, min(left_s, default=0.0))
