"""Who takes part: the status of every server, read into a `Deployment`, and looks at it later."""

import logging
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from pathlib import PurePath

from pydantic import SecretStr

from gymckpt.coordination.calls import Answers, attempt_each, call_each, get_status_reply, post, read_answer
from gymckpt.coordination.deployment import NO_PATH_MAP, Deployment, ParticipantRef, PathMap
from gymckpt.errors import DeadlinePassed, ServerError, UsageError
from gymckpt.identity import is_safe_name
from gymckpt.ports import Deadline, Reply, ServerRef, Transport
from gymckpt.wire.control import EXTENSION_PROBE, ProbeReply, Status

logger = logging.getLogger(__name__)

DISCOVERY_TRIES = 3
TRY_AGAIN_AFTER_S = 0.5
SKEW_WARNING_S = 5.0
SKEW_RESOLUTION_S = 1.0
"""A `Date` header tells whole seconds: a smaller difference is noise, and counts as none."""


async def discover(
    servers: Sequence[ServerRef],
    transport: Transport,
    token: SecretStr | None,
    deadline: Deadline,
    *,
    require_model: bool = False,
) -> Deployment:
    """Ask every server for its status, each up to three times: 404 = not a participant.

    Raises the server's refusal (a wrong token is `Unauthorized`); `ServerError` for any other answer or none, for two
    participants of one (kind, instance), and, with `require_model` (a trainer's wish), where no model server takes
    part; `UsageError` for two servers of one instance name.
    """
    _refuse_equal_names(servers)

    async def one(server: ServerRef) -> ParticipantRef | None:
        return await _discover_one(server, transport, token, deadline)

    found: list[ParticipantRef] = []
    plain: list[ServerRef] = []
    for server, result in zip(servers, await attempt_each(servers, one), strict=True):
        match result:
            case None:
                plain.append(server)
            case ParticipantRef():
                found.append(result)
            case error:
                raise error
    _refuse_twins(found)
    if require_model and not any(participant.kind == "model" for participant in found):
        raise ServerError("no model server takes part in checkpoints", hint="enable `checkpoint` on the policy model")
    return Deployment(tuple(found), tuple(plain))


def _refuse_equal_names(servers: Sequence[ServerRef]) -> None:
    names = [server.instance for server in servers]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two servers are both called {name!r}")


def _refuse_twins(participants: Sequence[ParticipantRef]) -> None:
    seen: dict[tuple[str, str], ParticipantRef] = {}
    for participant in participants:
        if (twin := seen.setdefault(participant.name, participant)) is not participant:
            raise ServerError(
                f"{participant.server.url} and {twin.server.url} both say that they are {participant}",
                hint="give every server its own instance name: a checkpoint is laid out by kind and instance",
            )


async def _discover_one(
    server: ServerRef, transport: Transport, token: SecretStr | None, deadline: Deadline
) -> ParticipantRef | None:
    reply, asked_at_s = await _persistent_status(server, transport, token, deadline)
    if reply.status == 404:
        return None
    status = read_answer(reply, Status, f"status of {server.instance}")
    if not is_safe_name(status.instance):
        raise ServerError(f"{server.url} calls itself {status.instance[:160]!r}, which is no safe instance name")
    return ParticipantRef(
        server=server,
        kind=status.kind,
        instance=status.instance,
        boot_id=status.boot_id,
        extensions=frozenset(status.extensions),
        skew_s=_skew_s(server, reply, asked_at_s),
        mode=status.mode,
        verify=status.verify,
    )


async def _persistent_status(
    server: ServerRef, transport: Transport, token: SecretStr | None, deadline: Deadline
) -> tuple[Reply, float]:
    """The reply, and when by our wall clock it was probably made; asks again where a server has trouble."""
    clock = deadline.clock
    tries_left = DISCOVERY_TRIES
    while True:
        tries_left -= 1
        sent_s = clock.time()
        try:
            reply = await get_status_reply(server, transport, token, deadline, repeat=False)
        except DeadlinePassed:
            raise
        except ServerError:
            if not tries_left:
                raise
        else:
            if reply.status < 500 or not tries_left:
                return reply, (sent_s + clock.time()) / 2
        await clock.sleep_until(clock.monotonic() + TRY_AGAIN_AFTER_S)


def _skew_s(server: ServerRef, reply: Reply, ours_s: float) -> float:
    try:
        # The header names the second that had begun: half a second is the best guess of what it cut off.
        theirs_s = parsedate_to_datetime(reply.headers["date"]).timestamp() + 0.5
    except (KeyError, ValueError, OverflowError):
        return 0.0
    skew_s = theirs_s - ours_s
    if abs(skew_s) <= SKEW_RESOLUTION_S:
        return 0.0
    if abs(skew_s) > SKEW_WARNING_S:
        logger.warning("the clock of %s differs from ours by %+.0f s; deadlines are shifted", server.instance, skew_s)
    return skew_s


async def statuses(
    deployment: Deployment, transport: Transport, token: SecretStr | None, deadline: Deadline
) -> Answers[Status]:
    """The status of every participant, now."""

    async def one(participant: ParticipantRef) -> Status:
        reply = await get_status_reply(participant.server, transport, token, deadline)
        status = read_answer(reply, Status, f"status of {participant}")
        if (status.kind, status.instance) != participant.name:
            raise ServerError(f"{participant.server.url} was {participant} and is now {status.kind} {status.instance}")
        return status

    return await call_each(deployment.participants, one)


async def probe(
    deployment: Deployment,
    transport: Transport,
    token: SecretStr | None,
    path: PurePath,
    nonce: str,
    deadline: Deadline,
    *,
    path_map: PathMap = NO_PATH_MAP,
) -> Answers[ProbeReply]:
    """Whether each participant that offers it sees the file at `path` (absolute here) holding `nonce`, and how many
    bytes it can still store there. Participants that do not offer it are in `unreached`."""

    async def one(participant: ParticipantRef) -> ProbeReply:
        body = {"path": path_map.seen_by(participant, path), "nonce": nonce}
        return await post(participant, transport, token, "probe", body, ProbeReply, deadline)

    able = [participant for participant in deployment.participants if participant.offers(EXTENSION_PROBE)]
    answers = await call_each(able, one)
    return Answers(answers.replies, answers.failures, deployment.lacking(EXTENSION_PROBE))
