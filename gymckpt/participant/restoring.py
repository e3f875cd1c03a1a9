"""Restore: only when idle and empty; read and check everything, then close and install all, or nothing."""

import logging
from collections.abc import Mapping

from gymckpt.errors import CheckpointFailed, DeadlineExceeded, InvalidPhase
from gymckpt.identity import MAX_ATTEMPT, EpisodeId
from gymckpt.participant.directories import part_directory
from gymckpt.participant.intake import Intake, take_in
from gymckpt.participant.phases import Active, Restore
from gymckpt.participant.points import (
    RESTORE_AFTER_INSTALL,
    RESTORE_AFTER_VALIDATE,
    RESTORE_BEFORE_INSTALL,
    pass_point,
)
from gymckpt.participant.retiring import Retiring
from gymckpt.participant.state import State
from gymckpt.participant.waiting import all_done, done_or, settled
from gymckpt.ports import Deadline
from gymckpt.wire.control import RestoreReply, RestoreRequest

NAMED_EPISODES = 5


async def restore(state: State, retiring: Retiring, request: RestoreRequest) -> RestoreReply:
    """Install the scoped episodes of a checkpoint as their next attempts, and stay closed until resume.

    On failure the participant is idle and open again, with nothing installed; when the deadline came in the middle of
    an install, only once that has ended and was undone.
    """
    named = _named(request)
    arguments = (request.checkpoint_dir, frozenset(named.items()))
    while True:
        active, deadline = state.enter(request)
        if active is None:
            _check_empty(state, retiring)
            active = state.begin(request.checkpoint_id, deadline)
            active.restore = Restore(arguments, deadline.at_s)
            active.restore.task = state.spawn(_carry_out(state, retiring, active, active.restore, request, named))
        if active.restore is None or active.restore.task is None:
            raise InvalidPhase(f"restore needs phase idle; {request.checkpoint_id} is {state.phase} here")
        if (kept := active.stored("restore", arguments, RestoreReply)) is not None:
            state.hold(deadline)
            return kept
        active.same("restore", active.restore.arguments, arguments)
        if not active.restore.abandoned:
            return await _await_install(state, active, active.restore, deadline)
        if not await all_done(deadline, [active.restore.task]):
            raise DeadlineExceeded(f"an earlier install of {request.checkpoint_id} has not ended yet")


def _named(request: RestoreRequest) -> dict[str, int]:
    named = {ref.rollout_id: ref.attempt for ref in request.episode_ids}
    if len(named) != len(request.episode_ids):
        raise CheckpointFailed("episode_ids names a rollout twice: give the last attempt of each once")
    if beyond := [rollout_id for rollout_id, attempt in named.items() if attempt >= MAX_ATTEMPT]:
        raise CheckpointFailed(f"rollout {beyond[0]} has no attempt left after {MAX_ATTEMPT}")
    return named


def _check_empty(state: State, retiring: Retiring) -> None:
    if live := set(state.role.live()):
        raise CheckpointFailed(
            f"restore needs an empty server; {len(live)} still live here: {', '.join(sorted(live)[:NAMED_EPISODES])}",
            hint="retire every unfinished attempt first, or start the server again",
        )
    if state.left_installing:
        raise CheckpointFailed(
            "restore needs an empty server; an install that was given up has not ended", hint="start the server again"
        )
    if unfinished := list(retiring.unfinished):
        raise CheckpointFailed(
            f"restore needs an empty server; retiring still {', '.join(unfinished[:NAMED_EPISODES])}"
        )


async def _await_install(state: State, active: Active, restore: Restore, deadline: Deadline) -> RestoreReply:
    task = restore.task
    assert task is not None
    restore.wanted_until_s = max(restore.wanted_until_s, deadline.at_s)
    state.hold(deadline)
    await done_or(task, active.ended, deadline)
    if active.ended.is_set() and active.ending is None:
        await settled(task)  # it failed by itself, and is about to say how
    if task.done() and not task.cancelled():
        return task.result()
    if active.ending is not None:
        state.check_going_on(active)
    if restore.wanted_until_s <= deadline.at_s:
        restore.abandon()
    raise DeadlineExceeded(
        f"restore {active.checkpoint_id} did not end by its deadline{state.waiting_for()}; nothing of it stays",
        hint="this participant opens again once the install under way has ended",
    )


async def _carry_out(
    state: State,
    retiring: Retiring,
    active: Active,
    restore: Restore,
    request: RestoreRequest,
    named: Mapping[str, int],
) -> RestoreReply:
    try:
        intake = await _read(state, request, named)
        await pass_point(state.offload, RESTORE_AFTER_VALIDATE)
        _check_wanted(state, active, restore)
        _check_empty(state, retiring)
        for rollout_id, attempt in named.items():
            state.marks.check(EpisodeId(rollout_id, attempt + 1))
        restore.installing, restore.attempts = True, intake.attempts
        state.close(active, "preparing")
        for rollout_id, attempt in named.items():
            state.marks.raise_mark(EpisodeId(rollout_id, attempt))
        await pass_point(state.offload, RESTORE_BEFORE_INSTALL)
        await state.role.install(intake.installable, intake.attempts)
        await pass_point(state.offload, RESTORE_AFTER_INSTALL)
        _check_wanted(state, active, restore)
    except BaseException:
        await _undo(state, active, restore)
        raise
    return _restored(state, active, restore, intake)


async def _read(state: State, request: RestoreRequest, named: Mapping[str, int]) -> Intake:
    directory = await state.offload.run(
        lambda: part_directory(
            state.fs, request.checkpoint_dir, state.settings.root, state.role.kind, state.role.instance
        )
    )
    return await take_in(state.role, state.settings, state.fs, state.offload, directory, named)


def _check_wanted(state: State, active: Active, restore: Restore) -> None:
    state.check_going_on(active)
    if restore.abandoned:
        raise DeadlineExceeded(f"restore {active.checkpoint_id} did not end by its deadline")


async def _undo(state: State, active: Active, restore: Restore) -> None:
    try:
        if restore.installing:
            await state.role.drop_restored(())
    finally:
        state.release(active)
        state.events.emit("restore_failed", level=logging.WARNING, checkpoint_id=active.checkpoint_id)


def _restored(state: State, active: Active, restore: Restore, intake: Intake) -> RestoreReply:
    state.phase = "restored"
    state.base = intake.base
    reply = RestoreReply(
        phase="restored",
        source_checkpoint_id=intake.source_checkpoint_id,
        restored=[episode.capture_key for episode in intake.episodes],
    )
    state.events.emit(
        "restored",
        checkpoint_id=active.checkpoint_id,
        source_checkpoint_id=intake.source_checkpoint_id,
        episodes=len(reply.restored),
    )
    return active.store("restore", restore.arguments, reply)
