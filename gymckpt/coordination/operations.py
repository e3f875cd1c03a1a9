"""One operation of the control plane across all participants, in its order. Stateless: every call is safe to repeat.

Each takes the deployment, a transport of its own (so that data connections never delay it), the bearer token, the
checkpoint id and the deadline by which participants must be done; a reply may come 5 s later.
"""

import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeVar

from pydantic import SecretStr

from gymckpt.coordination.calls import Answers, Failure, call_each, post, raise_failures
from gymckpt.coordination.deployment import (
    NO_PATH_MAP,
    PREPARE_ORDER,
    RESUME_ORDER,
    RETIRE_ORDER,
    Deployment,
    ParticipantName,
    ParticipantRef,
    PathMap,
    Stages,
    describe,
)
from gymckpt.errors import (
    DeadlineExceeded,
    DeadlinePassed,
    GymckptError,
    InvalidCheckpointState,
    InvalidRolloutId,
    ServerError,
)
from gymckpt.identity import EpisodeId
from gymckpt.ports import Deadline, Transport
from gymckpt.wire.control import (
    Answer,
    CommitReply,
    ForgetReply,
    PrepareReply,
    RenewReply,
    Report,
    RestoreReply,
    ResumeReply,
    RetireReply,
)

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=Answer)

RESUME_SHARE_S = 1.0
CLEANUP_S = 30.0
"""How long the clean-up after a failed restore may take."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """How far a prepare came."""

    ready: bool
    """Every participant is closed and at rest."""
    reports: Mapping[ParticipantName, Report]
    not_ready: tuple[ParticipantRef, ...] = ()
    """Participants that missed the deadline."""
    failures: tuple[Failure, ...] = ()
    unreached: tuple[ParticipantRef, ...] = ()
    restarts: Mapping[EpisodeId, str] = field(default_factory=dict)
    """Episodes that a participant cannot capture, each with the instance that says so (the last one asked)."""

    @property
    def blockers(self) -> tuple[str, ...]:
        """What kept the participants in `not_ready` from being ready, as they named it; each cuts its list at 100."""
        names = itertools.chain.from_iterable(self.reports[p.name].blockers for p in self.not_ready)
        return tuple(dict.fromkeys(names))

    @property
    def reason(self) -> str:
        """Why it is not ready, for a person."""
        if self.failures:
            return "; ".join(failure.error.detail for failure in self.failures)
        shown = ", ".join(self.blockers[:5]) or "nothing it names"
        more = len(self.blockers) - 5
        return f"{describe(self.not_ready)} still held by {shown}" + (f" and {more} more" if more > 0 else "")


async def prepare(
    deployment: Deployment, transport: Transport, token: SecretStr | None, checkpoint_id: str, deadline: Deadline
) -> Prepared:
    """Close admission and wait for rest: environment, model, agent, resources; stops at the first stage not ready.

    Never raises for what a participant did. Not ready: `resume`, or call it again with a later deadline.
    """
    reports: dict[ParticipantName, Report] = {}
    restarts: dict[EpisodeId, str] = {}
    stages = deployment.stages(PREPARE_ORDER)
    for number, stage in enumerate(stages):
        answers = await _post_each(stage, transport, token, "prepare", checkpoint_id, {}, PrepareReply, deadline)
        late = tuple(p for p in stage if p.name in answers.replies and not _is_prepared(answers.replies[p.name]))
        failures = list(answers.failures)
        for participant in stage:
            if (reply := answers.replies.get(participant.name)) is not None:
                reports[participant.name] = reply.report
                failures += _note_restarts(participant, reply.report, restarts)
        if late or failures:
            missed = tuple(f for f in failures if isinstance(f.error, DeadlineExceeded | DeadlinePassed))
            reports.update({f.participant.name: Report(ready=False) for f in missed})
            return Prepared(
                ready=False,
                reports=reports,
                not_ready=late + tuple(f.participant for f in missed),
                failures=tuple(f for f in failures if f not in missed),
                unreached=tuple(itertools.chain.from_iterable(stages[number + 1 :])),
                restarts=restarts,
            )
    return Prepared(True, reports, restarts=restarts)


def _is_prepared(reply: PrepareReply) -> bool:
    return reply.phase == "prepared" and reply.report.ready


def _note_restarts(participant: ParticipantRef, report: Report, restarts: dict[EpisodeId, str]) -> list[Failure]:
    try:
        for key in report.restarts:
            # The last stage that reports it is nearest to the cause: the others only learned of it from headers.
            restarts[EpisodeId.parse(key)] = participant.instance
    except InvalidRolloutId as error:
        return [Failure(participant, ServerError(f"prepare on {participant} reports a restart: {error.detail}"))]
    return []


async def commit(
    deployment: Deployment,
    transport: Transport,
    token: SecretStr | None,
    checkpoint_id: str,
    deadline: Deadline,
    *,
    checkpoint_dir: PurePath,
    episodes: Collection[EpisodeId] | None,
    stop: bool = False,
    path_map: PathMap = NO_PATH_MAP,
) -> Answers[CommitReply]:
    """Have every participant write the episodes in scope (None = all; a model server refuses None) into
    `checkpoint_dir` (absolute here). Only after a prepare that was ready."""
    scope = None if episodes is None else [_episode_body(episode) for episode in sorted(episodes)]

    async def one(participant: ParticipantRef) -> CommitReply:
        fields = {"checkpoint_dir": path_map.seen_by(participant, checkpoint_dir), "episode_ids": scope, "stop": stop}
        body = _body(participant, checkpoint_id, deadline, fields)
        reply = await post(participant, transport, token, "commit", body, CommitReply, deadline)
        if reply.phase != "committed":
            raise ServerError(f"commit on {participant} answered phase {reply.phase}")
        return reply

    return await call_each(deployment.participants, one)


async def renew(
    deployment: Deployment, transport: Transport, token: SecretStr | None, checkpoint_id: str, deadline: Deadline
) -> Answers[RenewReply]:
    """Lengthen every lease to at least `deadline` plus each participant's grace; fails where the id is not active."""
    return await _post_each(deployment.participants, transport, token, "renew", checkpoint_id, {}, RenewReply, deadline)


async def resume(
    deployment: Deployment, transport: Transport, token: SecretStr | None, checkpoint_id: str, deadline: Deadline
) -> Answers[ResumeReply]:
    """Open admission again, in the reverse order of prepare; also the abort. Goes on past failures and reports them.

    Each kind has its share of the time, and a second at least: one server that hangs keeps no other closed.
    """
    replies: dict[ParticipantName, ResumeReply] = {}
    failures: list[Failure] = []
    stages = deployment.stages(RESUME_ORDER)
    for number, stage in enumerate(stages):
        share_s = max(deadline.remaining_s / (len(stages) - number), RESUME_SHARE_S)
        answers = await _resume_stage(stage, transport, token, checkpoint_id, Deadline.after(deadline.clock, share_s))
        replies.update(answers.replies)
        failures += answers.failures
    return Answers(replies, tuple(failures))


async def _resume_stage(
    stage: Iterable[ParticipantRef],
    transport: Transport,
    token: SecretStr | None,
    checkpoint_id: str,
    deadline: Deadline,
) -> Answers[ResumeReply]:
    async def one(participant: ParticipantRef) -> ResumeReply:
        body = _body(participant, checkpoint_id, deadline, {})
        reply = await post(participant, transport, token, "resume", body, ResumeReply, deadline)
        if reply.phase != "idle":
            raise ServerError(f"resume on {participant} answered phase {reply.phase}")
        return reply

    return await call_each(stage, one)


async def restore(
    deployment: Deployment,
    transport: Transport,
    token: SecretStr | None,
    restore_id: str,
    deadline: Deadline,
    *,
    checkpoint_dir: PurePath,
    episodes: Collection[EpisodeId],
    path_map: PathMap = NO_PATH_MAP,
    cleanup: Deployment | None = None,
) -> Mapping[ParticipantName, RestoreReply]:
    """Install the records in `checkpoint_dir` (absolute here) everywhere, or nowhere.

    `episodes` names for each rollout the last attempt ever dispatched or installed; its record becomes the attempt
    after that one. Admission stays closed until `resume(restore_id)`. If any participant fails, the new attempts are
    retired and admission is opened on all of `cleanup` (default: this deployment), and the failure is raised.
    """
    scope = [_episode_body(episode) for episode in sorted(episodes)]

    async def one(participant: ParticipantRef) -> RestoreReply:
        fields = {"checkpoint_dir": path_map.seen_by(participant, checkpoint_dir), "episode_ids": scope}
        body = _body(participant, restore_id, deadline, fields)
        reply = await post(participant, transport, token, "restore", body, RestoreReply, deadline)
        if reply.phase != "restored":
            raise ServerError(f"restore on {participant} answered phase {reply.phase}")
        return reply

    answers = await call_each(deployment.participants, one)
    if answers.failures:
        everywhere = cleanup if cleanup is not None else deployment
        new_attempts = [episode.next for episode in episodes]
        await _undo_restore(everywhere, transport, token, restore_id, deadline, new_attempts)
        # A refusal tells more than the damage that another participant may have met.
        raise_failures(sorted(answers.failures, key=lambda failure: isinstance(failure.error, InvalidCheckpointState)))
    return answers.replies


async def _undo_restore(
    deployment: Deployment,
    transport: Transport,
    token: SecretStr | None,
    restore_id: str,
    deadline: Deadline,
    new_attempts: Sequence[EpisodeId],
) -> None:
    limit = Deadline.after(deadline.clock, CLEANUP_S)
    failures: tuple[Failure, ...] = ()
    if new_attempts:
        retired = await retire(
            deployment, transport, token, restore_id, limit, episodes=new_attempts, past_failures=True
        )
        failures = retired.failures
    resumed = await resume(deployment, transport, token, restore_id, Deadline.after(deadline.clock, CLEANUP_S))
    for failure in (*failures, *resumed.failures):
        logger.warning("after a failed restore: %s", failure.error.detail)


async def retire(
    deployment: Deployment,
    transport: Transport,
    token: SecretStr | None,
    checkpoint_id: str,
    deadline: Deadline,
    *,
    episodes: Collection[EpisodeId],
    past_failures: bool = False,
) -> Answers[RetireReply]:
    """Refuse, stop and free these attempts and every earlier one: environment, then agent, then model and resources.

    Only while no checkpoint is open. `checkpoint_id` names this action; it must not be one that was resumed. Stops at
    the first stage that fails, since whoever would call again must be stopped first, unless `past_failures`.
    """
    if not episodes:
        return Answers({})
    fields = {"episode_ids": [_episode_body(episode) for episode in sorted(episodes)]}

    async def one(participant: ParticipantRef) -> RetireReply:
        body = _body(participant, checkpoint_id, deadline, fields)
        return await post(participant, transport, token, "retire", body, RetireReply, deadline)

    return await _staged(deployment, RETIRE_ORDER, one, past_failures=past_failures)


async def forget(
    deployment: Deployment,
    transport: Transport,
    token: SecretStr | None,
    checkpoint_id: str,
    deadline: Deadline,
    *,
    rollout_ids: Collection[str],
) -> Answers[ForgetReply]:
    """Drop the marks of rollouts of which no attempt can run any more, in the order of `retire`."""
    if not rollout_ids:
        return Answers({})
    fields = {"rollout_ids": sorted(rollout_ids)}

    async def one(participant: ParticipantRef) -> ForgetReply:
        body = _body(participant, checkpoint_id, deadline, fields)
        return await post(participant, transport, token, "forget", body, ForgetReply, deadline)

    return await _staged(deployment, RETIRE_ORDER, one, past_failures=False)


def failed(answers: Answers[Any], doing: str) -> GymckptError | None:
    """One error that tells every failure and every participant not reached; None if there is none."""
    if answers.complete:
        return None
    told = [failure.error.detail for failure in answers.failures]
    if answers.unreached:
        told.append(f"not reached: {describe(answers.unreached)}")
    kind = type(answers.failures[0].error) if answers.failures else ServerError
    return kind(f"{doing}: " + "; ".join(told))


async def _staged(
    deployment: Deployment, order: Stages, call: Callable[[ParticipantRef], Awaitable[A]], *, past_failures: bool
) -> Answers[A]:
    replies: dict[ParticipantName, A] = {}
    failures: list[Failure] = []
    stages = deployment.stages(order)
    for number, stage in enumerate(stages):
        answers = await call_each(stage, call)
        replies.update(answers.replies)
        failures += answers.failures
        if failures and not past_failures:
            return Answers(replies, tuple(failures), tuple(itertools.chain.from_iterable(stages[number + 1 :])))
    return Answers(replies, tuple(failures))


async def _post_each(
    participants: Iterable[ParticipantRef],
    transport: Transport,
    token: SecretStr | None,
    operation: str,
    checkpoint_id: str,
    fields: Mapping[str, Any],
    answer: type[A],
    deadline: Deadline,
) -> Answers[A]:
    async def one(participant: ParticipantRef) -> A:
        body = _body(participant, checkpoint_id, deadline, fields)
        return await post(participant, transport, token, operation, body, answer, deadline)

    return await call_each(participants, one)


def _body(
    participant: ParticipantRef, checkpoint_id: str, deadline: Deadline, fields: Mapping[str, Any]
) -> dict[str, Any]:
    return {"checkpoint_id": checkpoint_id, "deadline_ts": participant.deadline_ts(deadline), **fields}


def _episode_body(episode: EpisodeId) -> dict[str, Any]:
    return {"rollout_id": episode.rollout_id, "attempt": episode.attempt}
