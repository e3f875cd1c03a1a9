"""Retire and forget: refuse attempts, stop and free them; later, drop the marks that refuse them.

Each retire runs in a task of its own, so that an interrupted call leaves its work tracked for a retry.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from gymckpt.errors import DeadlineExceeded, InvalidPhase, InvalidRolloutId
from gymckpt.identity import EpisodeId
from gymckpt.participant.points import FORGET_AFTER_DROP, RETIRE_AFTER_FREE, RETIRE_AFTER_MARK, pass_point
from gymckpt.participant.role import Role
from gymckpt.participant.state import State
from gymckpt.participant.waiting import all_done
from gymckpt.ports import Deadline
from gymckpt.wire.control import ForgetReply, ForgetRequest, Operation, RetireReply, RetireRequest

NAMED_EPISODES = 5


@dataclass
class _Work:
    attempt: int
    task: asyncio.Task[None]


class Retiring:
    """The unfinished retires of one role, one a rollout."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._work: dict[str, _Work] = {}

    def start(self, episode: EpisodeId) -> asyncio.Task[None]:
        """The task that frees this attempt and all earlier ones: the one that runs already, if it covers them.

        Otherwise a new one, which begins when the one before has ended: no clean-up is ever disturbed by another.
        """
        before = self._work.get(episode.rollout_id)
        if before is not None and not before.task.done() and before.attempt >= episode.attempt:
            return before.task
        task = asyncio.create_task(self._free(episode, before.task if before else None))
        self._work[episode.rollout_id] = _Work(episode.attempt, task)
        task.add_done_callback(lambda done: self._drop(episode.rollout_id, done))
        return task

    def covers(self, rollout_id: str) -> bool:
        """Whether a retire of the rollout is under way."""
        return rollout_id in self._work

    @property
    def unfinished(self) -> Collection[str]:
        """Rollouts with a retire under way."""
        return self._work.keys()

    async def stop_tasks(self) -> None:
        """Cancel every retire under way; for the end of the process."""
        tasks = [work.task for work in self._work.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _free(self, episode: EpisodeId, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        await self._role.retire(episode)

    def _drop(self, rollout_id: str, done: asyncio.Task[None]) -> None:
        work = self._work.get(rollout_id)
        if work is not None and work.task is done:
            del self._work[rollout_id]
        if not done.cancelled():
            done.exception()


async def retire(state: State, retiring: Retiring, request: RetireRequest) -> RetireReply:
    """Raise the marks, then stop and free the named attempts and all earlier ones; answers when nothing is left.

    Marks stay whatever happens. An install under way is waited for first. `DeadlineExceeded`: the work goes on, and a
    repeated retire awaits it.
    """
    deadline = _only_idle_or_restored(state, request)
    episodes = [ref.episode for ref in request.episode_ids]
    for episode in episodes:
        state.marks.raise_mark(episode)
    await pass_point(state.offload, RETIRE_AFTER_MARK)
    await _wait_for_install(state, deadline)
    if state.active is not None and state.active.restore is None:
        raise InvalidPhase(f"checkpoint {state.active.checkpoint_id} closed this participant before the retire began")
    last = {episode.rollout_id: episode for episode in sorted(episodes)}
    tasks = {episode: retiring.start(episode) for episode in last.values()}
    if not await all_done(deadline, list(tasks.values())):
        left = [episode.capture_key for episode, task in tasks.items() if not task.done()]
        raise DeadlineExceeded(
            f"{len(left)} of {len(tasks)} rollouts are not free yet, among them {', '.join(left[:NAMED_EPISODES])}",
            hint="they are refused already; repeat the retire to await the rest",
        )
    for task in tasks.values():
        task.result()
    state.events.emit("retired", episodes=len(episodes))
    await pass_point(state.offload, RETIRE_AFTER_FREE)
    return RetireReply(retired=[episode.capture_key for episode in episodes])


async def forget(state: State, retiring: Retiring, request: ForgetRequest) -> ForgetReply:
    """Drop the marks of rollouts none of whose attempts can run any more; those that still have one keep theirs.

    The reply names the rollouts that have no mark now.
    """
    _only_idle_or_restored(state, request)
    alive = {rollout_id for key in state.role.live() if (rollout_id := _rollout_of(key)) is not None}
    forgotten = [
        rollout_id
        for rollout_id in dict.fromkeys(request.rollout_ids)
        if rollout_id not in alive and not retiring.covers(rollout_id)
    ]
    for rollout_id in forgotten:
        state.marks.forget(rollout_id)
    state.events.emit("forgotten", rollouts=len(forgotten))
    await pass_point(state.offload, FORGET_AFTER_DROP)
    return ForgetReply(forgotten=forgotten)


def _only_idle_or_restored(state: State, request: Operation) -> Deadline:
    """In a checkpoint an episode's clean-up calls wait for resume: a retire would wait for itself."""
    active, deadline = state.enter(request)
    if active is not None:
        if active.restore is None:
            raise InvalidPhase(f"only an idle or restored participant retires and forgets; this one is {state.phase}")
        state.hold(deadline)
    return deadline


async def _wait_for_install(state: State, deadline: Deadline) -> None:
    while (active := state.active) is not None and active.restore is not None and active.restore.task is not None:
        if active.restore.task.done():
            return
        if not await all_done(deadline, [active.restore.task]):
            raise DeadlineExceeded(
                f"the restore {active.checkpoint_id} has not ended yet", hint="the marks are up; repeat the retire"
            )


def _rollout_of(key: str) -> str | None:
    try:
        return EpisodeId.parse(key).rollout_id
    except InvalidRolloutId:
        return None
