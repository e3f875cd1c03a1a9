"""Prepare: close admission, then wait until nothing blocks any more, or the deadline."""

import asyncio
import logging

from gymckpt.errors import CheckpointFailed, InvalidPhase
from gymckpt.participant.phases import Active
from gymckpt.participant.points import PREPARE_AFTER_CLOSE, PREPARE_READY, pass_point
from gymckpt.participant.readiness import on_the_wire
from gymckpt.participant.state import State
from gymckpt.ports import Deadline
from gymckpt.wire.control import Operation, PrepareReply

NAMED_BLOCKERS = 5
"""Blockers that the log line of a prepare that was not ready names."""


async def prepare(state: State, request: Operation) -> PrepareReply:
    """Close, and wait until ready: phase `prepared`; or `preparing` at the deadline, and then it stays closed.

    Whatever is raised inside opens admission again. A resume meanwhile makes it `stale_checkpoint`.
    """
    active, deadline = state.enter(request)
    if active is not None and (kept := active.stored("prepare", None, PrepareReply)) is not None:
        state.hold(deadline)
        return kept
    if active is not None and active.restore is not None:
        raise InvalidPhase(f"{request.checkpoint_id} is a restore here: it cannot be prepared")
    try:
        if active is None:
            active = state.begin(request.checkpoint_id, deadline)
            state.close(active, "preparing")
            await pass_point(state.offload, PREPARE_AFTER_CLOSE)
        else:
            state.hold(deadline)
        return await _become_ready(state, active, deadline)
    except asyncio.CancelledError:
        raise  # the caller went away: closed, under its lease, until it repeats or resumes
    except BaseException:
        if active is not None and not active.ended.is_set() and state.phase == "preparing":
            state.release(active)
        raise


async def _become_ready(state: State, active: Active, deadline: Deadline) -> PrepareReply:
    while await state.readiness.wait(active.ended, deadline):
        await pass_point(state.offload, PREPARE_READY)
        _check_going_on(state, active)
        if (kept := active.stored("prepare", None, PrepareReply)) is not None:
            return kept
        report = state.readiness.look()
        if report.ready:
            state.phase = "prepared"
            state.events.emit(
                "prepared",
                checkpoint_id=active.checkpoint_id,
                restarts=len(report.restarts),
                waited_s=round(state.clock.monotonic() - (active.closed_at_s or 0.0), 6),
            )
            return active.store("prepare", None, PrepareReply(phase="prepared", report=on_the_wire(report)))
    _check_going_on(state, active)
    report = state.readiness.look()
    blockers = on_the_wire(report)
    state.events.emit(
        "prepare_not_ready",
        level=logging.WARNING,
        checkpoint_id=active.checkpoint_id,
        blocker_count=blockers.blocker_count,
        blockers=blockers.blockers[:NAMED_BLOCKERS],
    )
    return active.stored("prepare", None, PrepareReply) or PrepareReply(phase="preparing", report=blockers)


def _check_going_on(state: State, active: Active) -> None:
    if active.ended.is_set() and active.ending is None:
        raise CheckpointFailed(f"another prepare of {active.checkpoint_id} failed, and admission opened again")
    state.check_going_on(active)
