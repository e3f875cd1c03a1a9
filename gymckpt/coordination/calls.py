"""One control call to one participant: skew, repeats, the refusals mapped back, the reply checked.

Control calls are safe to repeat, so one whose connection broke is sent again while its deadline lasts.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import SecretStr, ValidationError

from gymckpt.coordination.deployment import ParticipantName, ParticipantRef
from gymckpt.errors import (
    CONTROL_ERRORS,
    CheckpointFailed,
    DeadlinePassed,
    GymckptError,
    NotSent,
    ServerError,
    Unauthorized,
)
from gymckpt.ports import Deadline, Reply, ServerRef, Transport
from gymckpt.wire.client import excerpt
from gymckpt.wire.control import PREFIX, Answer, ErrorReply

A = TypeVar("A", bound=Answer)
R = TypeVar("R")
T = TypeVar("T")

REPLY_GRACE_S = 5.0
"""A participant works until the deadline; its reply may come this much later."""
REPEAT_AFTER_S = (0.1, 0.4, 1.5)
"""Pauses before the repeats of a call whose connection broke; further ones wait as long as the last."""
REFUSED_REPEATS = 3
"""A server that refuses connections is dead, or being started: only so many repeats are worth the wait."""
MAX_CONTROL_REPLY_BYTES = 64 << 20
UNAUTHORIZED_HINT = "give the servers' own token in GYMCKPT_CONTROL_TOKEN, or in a file with --control-token-file"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one participant did not do what it was asked."""

    participant: ParticipantRef
    error: GymckptError
    """Its detail names the operation and the instance."""


@dataclass(frozen=True, slots=True)
class Answers(Generic[R]):
    """What every participant answered to one operation."""

    replies: Mapping[ParticipantName, R]
    failures: tuple[Failure, ...] = ()
    unreached: tuple[ParticipantRef, ...] = ()
    """Participants that were not asked, because an earlier stage failed or was not ready."""

    @property
    def complete(self) -> bool:
        """Whether every participant was asked and answered."""
        return not self.failures and not self.unreached

    def require(self) -> Mapping[ParticipantName, R]:
        """The replies; raises what `raise_failures` raises if any is missing."""
        raise_failures(self.failures)
        return self.replies


def raise_failures(failures: Iterable[Failure]) -> None:
    """Raise the first failure, its message followed by those of the others; do nothing if there is none."""
    known = list(failures)
    if known:
        first = known[0].error
        raise type(first)("; ".join(f.error.detail for f in known), hint=first.hint) from first


async def attempt_each(items: Iterable[T], call: Callable[[T], Awaitable[R]]) -> list[R | GymckptError]:
    """Call for all items at once; errors on purpose are given back in place of results, anything else is raised."""

    async def one(item: T) -> R | GymckptError:
        try:
            return await call(item)
        except GymckptError as error:
            return error

    return list(await asyncio.gather(*(one(item) for item in items)))


async def call_each(
    participants: Iterable[ParticipantRef], call: Callable[[ParticipantRef], Awaitable[R]]
) -> Answers[R]:
    """Call all participants at once; errors on purpose become failures, in the order of `participants`."""
    asked = list(participants)
    replies: dict[ParticipantName, R] = {}
    failures: list[Failure] = []
    for participant, result in zip(asked, await attempt_each(asked, call), strict=True):
        if isinstance(result, GymckptError):
            failures.append(Failure(participant, result))
        else:
            replies[participant.name] = result
    return Answers(replies, tuple(failures))


async def post(
    participant: ParticipantRef,
    transport: Transport,
    token: SecretStr | None,
    operation: str,
    body: Mapping[str, Any],
    answer: type[A],
    deadline: Deadline,
) -> A:
    """`POST /<operation>`; the checked reply.

    Raises the `ControlError` that it refused with, or `ServerError` (`NotSent`, `DeadlinePassed`); each names it.
    """
    label = f"{operation} on {participant}"
    reply = await _exchange(participant.server, transport, token, "POST", operation, body, deadline, label)
    return read_answer(reply, answer, label)


async def get_status_reply(
    server: ServerRef, transport: Transport, token: SecretStr | None, deadline: Deadline, *, repeat: bool = True
) -> Reply:
    """The raw reply to `GET /status`; raises `ServerError`."""
    label = f"status of {server.instance}"
    return await _exchange(server, transport, token, "GET", "status", None, deadline, label, repeat=repeat)


async def _exchange(
    server: ServerRef,
    transport: Transport,
    token: SecretStr | None,
    method: str,
    operation: str,
    body: Mapping[str, Any] | None,
    deadline: Deadline,
    label: str,
    *,
    repeat: bool = True,
) -> Reply:
    headers = {"authorization": f"Bearer {token.get_secret_value()}"} if token is not None else {}
    limit = Deadline(deadline.clock, deadline.at_s + REPLY_GRACE_S)
    for number in itertools.count():
        try:
            return await transport.call(server, method, f"{PREFIX}/{operation}", body, deadline=limit, headers=headers)
        except DeadlinePassed as error:
            raise DeadlinePassed(f"{label}: {error.detail}") from error
        except ServerError as error:
            pause_s = REPEAT_AFTER_S[min(number, len(REPEAT_AFTER_S) - 1)]
            dead = isinstance(error, NotSent) and number >= REFUSED_REPEATS
            if not repeat or dead or pause_s >= deadline.remaining_s:
                raise type(error)(f"{label}: {error.detail}", hint=error.hint) from error
            await deadline.clock.sleep_until(deadline.clock.monotonic() + pause_s)
    raise AssertionError("counting never ends")


def read_answer(reply: Reply, answer: type[A], label: str) -> A:
    """The reply as `answer`; raises the refusal in it, or `ServerError` if it is neither."""
    if len(reply.body) > MAX_CONTROL_REPLY_BYTES:
        raise ServerError(f"{label}: a reply of {len(reply.body)} bytes is more than {MAX_CONTROL_REPLY_BYTES}")
    try:
        if not 200 <= reply.status < 300:
            refusal = ErrorReply.model_validate_json(reply.body).error
            error = CONTROL_ERRORS.get(refusal.code, CheckpointFailed)
            hint = UNAUTHORIZED_HINT if error is Unauthorized else None
            raise error(f"{label} was refused ({refusal.code[:80]}): {refusal.detail[:1000]}", hint=hint)
        return answer.model_validate_json(reply.body)
    except ValidationError as error:
        raise ServerError(
            f"{label}: HTTP {reply.status} with a body that is no {answer.__name__}: {excerpt(reply)}",
            hint="is this a participant of the checkpoint control plane, behind no proxy that answers for it?",
        ) from error
