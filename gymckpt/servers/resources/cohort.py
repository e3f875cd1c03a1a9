"""Answers that are verified together: each waits until its whole cohort is there, and gets its part of the verdict.

Nothing here outlives the process, and nothing needs to: after a crash the members verify again, all of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gymckpt.errors import GymckptError, ServerError, StaleAttempt
from gymckpt.identity import EpisodeId
from gymckpt.ports import Clock

A = TypeVar("A")
V = TypeVar("V")


class CohortIncomplete(ServerError):
    """A cohort's answers did not all come in time: none of them is verified."""

    code = "cohort_incomplete"
    http_status = 504


@dataclass(eq=False)
class _Member(Generic[A, V]):
    answer: A
    attempt: int
    verdict: "asyncio.Future[V]"


@dataclass(eq=False)
class _Cohort(Generic[A, V]):
    size: int
    members: dict[str, _Member[A, V]] = field(default_factory=dict)


class Cohorts(Generic[A, V]):
    """The cohorts that are gathering, by their id. `compare` gives a verdict to each of a cohort's members.

    It is called once all are there, with the answers by member, in an order that does not depend on who came first.
    """

    def __init__(
        self, compare: Callable[[Mapping[str, A]], Awaitable[Mapping[str, V]]], clock: Clock, timeout_s: float
    ) -> None:
        self._compare = compare
        self._clock = clock
        self._timeout_s = timeout_s
        self._gathering: dict[str, _Cohort[A, V]] = {}
        self._comparing: set[asyncio.Task[None]] = set()

    async def verdict(self, cohort_id: str, size: int, member: EpisodeId, answer: A) -> V:
        """This answer's verdict, once `size` members of the cohort have come.

        A later attempt of a member takes the place of an earlier one. Raises `CohortIncomplete` after `timeout_s` of
        waiting, `StaleAttempt` for an attempt that was overtaken, and what `compare` raises, the same for all.
        """
        cohort = self._gathering.get(cohort_id)
        if cohort is None or cohort.size != size:
            cohort = self._gathering[cohort_id] = _Cohort(size)
        mine = self._joined(cohort, member, answer)
        if len(cohort.members) == size:
            del self._gathering[cohort_id]
            self._begin(cohort)
        try:
            return await self._waited(cohort_id, cohort, mine)
        finally:
            self._leave(cohort_id, cohort, member, mine)

    async def close(self) -> None:
        """Stop every comparison."""
        for task in self._comparing:
            task.cancel()
        await asyncio.gather(*self._comparing, return_exceptions=True)

    def _joined(self, cohort: _Cohort[A, V], member: EpisodeId, answer: A) -> _Member[A, V]:
        known = cohort.members.get(member.rollout_id)
        if known is not None and known.attempt > member.attempt:
            raise StaleAttempt(f"a later attempt of {member} is being compared")
        if known is not None and known.attempt == member.attempt:
            known.answer = answer
            return known
        if known is not None and not known.verdict.done():
            known.verdict.set_exception(StaleAttempt(f"{member} has taken the place of attempt {known.attempt}"))
            known.verdict.exception()  # it is told to whoever waits; nobody may
        mine = _Member[A, V](answer, member.attempt, asyncio.get_running_loop().create_future())
        cohort.members[member.rollout_id] = mine
        return mine

    async def _waited(self, cohort_id: str, cohort: _Cohort[A, V], mine: _Member[A, V]) -> V:
        waiting = asyncio.ensure_future(self._clock.sleep_until(self._clock.monotonic() + self._timeout_s))
        try:
            either: list[asyncio.Future[Any]] = [waiting, mine.verdict]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not mine.verdict.done() and self._gathering.get(cohort_id) is cohort:
                raise CohortIncomplete(
                    f"cohort {cohort_id[:160]}: {len(cohort.members)} of {cohort.size} answers came in "
                    f"{self._timeout_s:g} s"
                )
        finally:
            waiting.cancel()
        # Complete: from here on it takes as long as the comparison takes. Others wait for the same future.
        return await asyncio.shield(mine.verdict)

    def _leave(self, cohort_id: str, cohort: _Cohort[A, V], member: EpisodeId, mine: _Member[A, V]) -> None:
        if self._gathering.get(cohort_id) is not cohort or cohort.members.get(member.rollout_id) is not mine:
            return
        del cohort.members[member.rollout_id]
        if not cohort.members:
            del self._gathering[cohort_id]

    def _begin(self, cohort: _Cohort[A, V]) -> None:
        task = asyncio.create_task(self._compared(cohort))
        self._comparing.add(task)
        task.add_done_callback(self._comparing.discard)

    async def _compared(self, cohort: _Cohort[A, V]) -> None:
        members = dict(sorted(cohort.members.items()))
        failure: GymckptError = ServerError("the comparison of a cohort was broken off")
        verdicts: Mapping[str, V] = {}
        try:
            verdicts = await self._compare({name: member.answer for name, member in members.items()})
        except GymckptError as error:
            failure = error
        finally:
            for name, member in members.items():
                if member.verdict.done():
                    continue
                if name in verdicts:
                    member.verdict.set_result(verdicts[name])
                else:
                    member.verdict.set_exception(failure)
                    member.verdict.exception()  # told to whoever still waits
