"""Commit: from prepared, export once, write until it is there, then let go of what the checkpoint leaves out."""

import heapq
import logging
from collections.abc import Iterable

from gymckpt.errors import CheckpointFailed, ControlError, DeadlineExceeded, InvalidPhase, RestartInScope
from gymckpt.identity import EpisodeId
from gymckpt.participant.directories import part_directory
from gymckpt.participant.export import Export
from gymckpt.participant.phases import Active, Commit
from gymckpt.participant.role import BeforeExport
from gymckpt.participant.state import SETTLE_PATIENCE_S, State
from gymckpt.participant.waiting import all_done, done_or
from gymckpt.ports import Deadline
from gymckpt.storage.scope import OWNERS
from gymckpt.storage.writer import Written
from gymckpt.wire.control import CommitReply, CommitRequest

NAMED_EPISODES = 5
"""Episodes that a refusal names at most."""


async def commit(state: State, request: CommitRequest) -> CommitReply:
    """Write this participant's part of the checkpoint, with a manifest at the end.

    A write that outlives the deadline raises `DeadlineExceeded` and goes on; a repeated commit awaits it. One that
    failed is written again from the same export.
    """
    scope = None if request.episode_ids is None else frozenset(ref.episode for ref in request.episode_ids)
    arguments = (request.checkpoint_dir, scope, request.stop)
    active, deadline = _committing(state, request)
    if (kept := active.stored("commit", arguments, CommitReply)) is not None:
        state.hold(deadline)
        return kept
    if active.commit is None:
        _check_ready(state, scope)
        active.commit = Commit(arguments, scope, request.stop)
    active.same("commit", active.commit.arguments, arguments)
    state.hold(deadline)
    return await _await_write(state, active, active.commit, request.checkpoint_dir, deadline)


def _committing(state: State, request: CommitRequest) -> tuple[Active, Deadline]:
    active, deadline = state.enter(request)
    if active is None or state.phase not in ("prepared", "committed"):
        raise InvalidPhase(f"commit needs phase prepared; this participant is {state.phase}")
    return active, deadline


def _check_ready(state: State, scope: frozenset[EpisodeId] | None) -> None:
    if scope is None and state.role.kind == "model":
        raise CheckpointFailed("a model server commits only a scope that names its episodes, never null")
    report = state.readiness.look()
    if not report.ready:
        raise CheckpointFailed(
            f"no longer ready: {len(report.blockers)} blockers, among them {_some(report.blockers)}",
            hint="resume, and prepare a new checkpoint",
        )
    if scope is not None and (named := {episode.capture_key for episode in scope} & set(report.restarts)):
        raise RestartInScope(f"the scope names {len(named)} restarts, among them {_some(named)}")


def _some(names: Iterable[str]) -> str:
    return ", ".join(heapq.nsmallest(NAMED_EPISODES, names))


async def _await_write(state: State, active: Active, commit: Commit, directory: str, deadline: Deadline) -> CommitReply:
    task = commit.task
    if task is None or task.done():
        task = commit.task = state.spawn(_carry_out(state, active, commit, directory, deadline))
    await done_or(task, active.ended, deadline)
    if task.done() and not task.cancelled():
        return task.result()
    state.check_going_on(active)
    raise DeadlineExceeded(
        f"the write of {active.checkpoint_id} outlived the deadline and goes on{state.waiting_for()}",
        hint="repeat the commit to await it",
    )


async def _carry_out(state: State, active: Active, commit: Commit, directory: str, deadline: Deadline) -> CommitReply:
    export = commit.export
    if export is None:
        try:
            export = commit.export = await _begin_export(state, active, commit, directory, deadline)
        except ControlError:
            active.commit = None  # nothing was exported: the next call may name another directory
            raise
    written = await export.run()
    state.base = written.base
    state.check_going_on(active)
    commit.settling = True
    if commit.scope is not None:
        await state.role.drop_restored(commit.scope)
    if commit.suspends:
        await _suspend(state, active, export.episodes)
    state.check_going_on(active)
    state.phase = "committed"
    reply = _reply(state, export, written)
    state.events.emit("committed", checkpoint_id=active.checkpoint_id, episodes=len(reply.episode_ids))
    return active.store("commit", commit.arguments, reply)


async def _begin_export(state: State, active: Active, commit: Commit, text: str, deadline: Deadline) -> Export:
    role, settings = state.role, state.settings
    directory = await state.offload.run(lambda: part_directory(state.fs, text, settings.root, role.kind, role.instance))
    state.check_going_on(active)
    if isinstance(role, BeforeExport):
        await role.before_export(active.checkpoint_id, commit.scope, deadline)
    return Export(
        role,
        settings,
        state.fs,
        state.offload,
        checkpoint_id=active.checkpoint_id,
        directory=directory,
        scope=commit.scope,
        base=state.base,
    )


async def _suspend(state: State, active: Active, episodes: Iterable[EpisodeId]) -> None:
    """Best effort: a checkpoint does not fail because compute could not be suspended."""
    active.suspended = tuple(episodes)
    suspend = active.suspending = state.spawn(state.role.suspend_compute(active.suspended))
    await all_done(Deadline.after(state.clock, SETTLE_PATIENCE_S), [suspend])
    if not suspend.done() or suspend.cancelled() or suspend.exception() is not None:
        state.events.emit("suspend_failed", level=logging.ERROR, checkpoint_id=active.checkpoint_id)


def _reply(state: State, export: Export, written: Written) -> CommitReply:
    fields = dict(export.fields)
    if state.role.kind in OWNERS:
        fields["needs_by_episode"] = export.needs
    return CommitReply(
        phase="committed",
        manifest=written.manifest,
        episode_ids=[episode.capture_key for episode in export.episodes],
        **fields,
    )
