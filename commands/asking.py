"""Asks servers for their status, for people: one that cannot be asked is part of the answer."""

import asyncio
from collections.abc import Sequence

from pydantic import SecretStr

from gymckpt.coordination.calls import get_status_reply, read_answer
from gymckpt.errors import GymckptError, Unauthorized
from gymckpt.ports import Deadline, ServerRef, SystemClock, Transport
from gymckpt.report.documents import ServerView
from gymckpt.wire.client import HttpTransport
from gymckpt.wire.control import Status

STATUS_TIMEOUT_S = 10.0


async def ask(servers: Sequence[ServerRef], token: SecretStr) -> list[ServerView]:
    """The status of every server; what cannot be asked says so in `problem`."""
    deadline = Deadline.after(SystemClock(), STATUS_TIMEOUT_S)
    async with HttpTransport(max_connections=len(servers)) as transport:
        return list(await asyncio.gather(*(_ask_one(server, transport, token, deadline) for server in servers)))


async def _ask_one(server: ServerRef, transport: Transport, token: SecretStr, deadline: Deadline) -> ServerView:
    try:
        reply = await get_status_reply(server, transport, token, deadline)
        if reply.status == 404:
            return ServerView(instance=server.instance, url=server.url, kind=None)
        found = read_answer(reply, Status, f"status of {server.instance}")
    except Unauthorized:
        return ServerView(instance=server.instance, url=server.url, kind=None, problem="refuses this token")
    except GymckptError as error:
        return ServerView(instance=server.instance, url=server.url, kind=None, problem=error.detail)
    return ServerView(
        instance=server.instance,
        url=server.url,
        kind=found.kind,
        phase=found.phase,
        checkpoint_id=found.checkpoint_id,
        lease_expires_at=found.lease_expires_at,
        mode=found.mode,
        verify=found.verify,
        boot_id=found.boot_id,
        in_flight=found.report.counts,
        blockers=found.report.blockers,
        blocker_count=found.report.blocker_count,
        restarts=len(found.report.restarts),
        retired_rollouts=found.retired_rollouts,
        counters=found.counters,
    )
