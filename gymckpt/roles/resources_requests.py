"""Requests of sessions: they wait out a checkpoint, they are bound to episodes, they end when their session does."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gymckpt.errors import CheckpointFailed, StaleAttempt
from gymckpt.identity import EpisodeId
from gymckpt.participant.admission import Gate
from gymckpt.participant.marks import Marks
from gymckpt.ports import Clock
from gymckpt.roles.resources_hooks import SessionHooks, SessionStateError, free_state
from gymckpt.roles.resources_sessions import Session, Sessions, cancel_once
from gymckpt.wire.control import ResourcesMode, VerifyMode

log = logging.getLogger(__name__)
T = TypeVar("T")

FREED_AFTER_VERIFY_S = 60.0
"""A verified session whose caller never closes it is freed after this."""


class SessionRequests:
    """What a resources server sends its requests through: `seed`, `call`, `verify`, `close_session`.

    Reads that change nothing need not pass here.
    """

    def __init__(
        self,
        instance: str,
        hooks: SessionHooks,
        *,
        mode: ResourcesMode,
        verify: VerifyMode,
        marks: Marks,
        clock: Clock,
        hook_s: float,
    ) -> None:
        self.instance = instance
        self.gate = Gate()
        """Never closes where nothing is ever captured."""
        self.sessions = Sessions(instance, marks)
        self._marks = marks
        self._hooks = hooks
        self._clock = clock
        self._hook_s = hook_s
        self._stateless = mode == "stateless"
        self._repeatable = self._stateless and verify == "replay"
        self._background: set[asyncio.Task[None]] = set()
        self._ending: dict[Session, asyncio.Task[None]] = {}

    async def seed(
        self,
        session_id: str,
        episode: EpisodeId | None,
        caller_id: str | None,
        work: Callable[[Session], Coroutine[Any, Any, None]],
    ) -> Session:
        """Make a session by `work` and bind it to `episode`, after any checkpoint.

        The same caller id and episode again (a transport retry) is the same session. A new one replaces those that the
        rollout had. Raises `StaleAttempt` for an attempt that was retired or overtaken.
        """
        await self.gate.wait_open()
        while (known := self.sessions.of_caller(caller_id)) is not None and known.episode == episode:
            if known.seeded.is_set():
                return self._touched(known.session_id, episode)
            await known.seeded.wait()
            await self.gate.wait_open()
        self._check_newest(episode)
        session = Session(session_id, episode, caller_id)
        self.sessions.add(session)
        try:
            with self.gate.in_flight(session.name):
                await self._run(session, work(session))
                self._check_newest(episode)
                await self._replace_others(session)
        except BaseException:
            await self.end(session, retired=False)
            raise
        finally:
            session.seeded.set()
        return session

    async def call(
        self,
        session_id: str | None,
        episode: EpisodeId | None,
        work: Callable[[Session], Coroutine[Any, Any, T]],
    ) -> T:
        """Do `work`, a request that may change its session; waits while a checkpoint is open.

        `episode` is the one that the request's path names, if any. Raises `UnknownSession` and `StaleAttempt`.
        """
        await self.gate.wait_open()
        session = self._touched(session_id, episode)
        with self.gate.in_flight(session.name):
            return await self._run(session, work(session))

    async def verify(
        self,
        session_id: str | None,
        episode: EpisodeId | None,
        work: Callable[[Session | None], Coroutine[Any, Any, T]],
    ) -> T:
        """Do `work`, the verification; success is the session's end, though it stays until it is closed.

        A stateless server whose verification can be repeated lets it pass a checkpoint, uncounted; a stateless server
        also verifies for callers that have no session.
        """
        if session_id is None and self._stateless:
            return await self._verify_without_session(work)
        if self._repeatable:
            session = self._touched(session_id, episode)
            result = await self._run(session, work(session))
        else:
            await self.gate.wait_open()
            session = self._touched(session_id, episode)
            with self.gate.in_flight(session.name):
                result = await self._run(session, work(session))
        if not session.verified:
            session.verified = True
            self._in_background(self._end_unclosed(session))
        return result

    async def _verify_without_session(self, work: Callable[[Session | None], Coroutine[Any, Any, T]]) -> T:
        if self._repeatable:
            return await work(None)
        async with self.gate.admit("<verify>"):
            return await work(None)

    async def close_session(self, session_id: str | None, episode: EpisodeId | None, caller_id: str | None) -> None:
        """End a session. Never refused, and never waits for a checkpoint: then the end is recorded and comes later.

        Does nothing for a session that is not held, or that another attempt than `episode` owns by now: the clean-up of
        a dead attempt can arrive after its successor was restored under the same cookie.
        """
        session = self.sessions.get(session_id) or self.sessions.of_caller(caller_id)
        if session is None or (episode is not None and session.episode not in (None, episode)):
            return
        session.closed = True
        if self.gate.is_open:
            await self.end(session, retired=False)

    def carry_out_ends(self) -> None:
        """End every session whose end was recorded while a checkpoint was open."""
        for session in self.sessions:
            if session.closed:
                self._begin_end(session, retired=False)

    def _touched(self, session_id: str | None, episode: EpisodeId | None) -> Session:
        session = self.sessions.usable(session_id, episode)
        session.restored = False
        self.sessions.touch(session)
        return session

    async def _run(self, session: Session, work: Coroutine[Any, Any, T]) -> T:
        # The work has a task of its own, so that a retire can stop it and still answer its caller.
        task = asyncio.create_task(work)
        session.tasks.add(task)
        task.add_done_callback(session.tasks.discard)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancel_once(task)
            await asyncio.wait([task])
            raise
        if task.cancelled():
            raise StaleAttempt(f"{self.instance}: {session} ended while this request ran")
        return task.result()

    @property
    def ending(self) -> list[Session]:
        """Sessions that are held no more but not yet freed."""
        return list(self._ending)

    async def end(self, session: Session, *, retired: bool) -> None:
        """Stop what runs in the session, hold it no more, free its state; return when nothing is left.

        Concurrent calls share the work. Raises `SessionStateError` if it cannot be freed: then the session stays among
        `ending`, and the next call tries again.
        """
        await asyncio.shield(self._begin_end(session, retired=retired))

    def _begin_end(self, session: Session, *, retired: bool) -> asyncio.Task[None]:
        self.sessions.remove(session, retired=retired)
        task = self._ending.get(session)
        if task is None or task.done():
            task = self._ending[session] = asyncio.create_task(self._free(session))
            task.add_done_callback(lambda done: self._ended(session, done))
        return task

    def _ended(self, session: Session, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            log.warning("%s: not freed: %s", self.instance, error or session)
        else:
            self._ending.pop(session, None)
        self.gate.changed.notify()

    async def _free(self, session: Session) -> None:
        running = set(session.tasks)
        for task in running:
            cancel_once(task)
        if running:
            await asyncio.wait(running)
        try:
            await free_state(self._hooks, session.session_id, self._hook_s)
        except CheckpointFailed as error:
            raise SessionStateError(f"{session}: {error.detail}", session_id=session.session_id) from error

    def _check_newest(self, episode: EpisodeId | None) -> None:
        if episode is None:
            return
        self._marks.check(episode)
        if any(other.episode and other.episode > episode for other in self.sessions.of_rollout(episode.rollout_id)):
            raise StaleAttempt(f"{self.instance}: a later attempt of {episode} has a session here")

    async def _replace_others(self, session: Session) -> None:
        if session.episode is None:
            return
        for other in self.sessions.of_rollout(session.episode.rollout_id):
            if other is not session and other.seeded.is_set():
                await self.end(other, retired=True)

    async def _end_unclosed(self, session: Session) -> None:
        await self._clock.sleep_until(self._clock.monotonic() + FREED_AFTER_VERIFY_S)
        await self.gate.wait_open()
        if self.sessions.get(session.session_id) is session:
            self._begin_end(session, retired=False)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
