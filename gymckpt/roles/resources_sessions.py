"""The sessions of a resources server: which episode each belongs to, what runs in it, and which were retired."""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gymckpt.errors import StaleAttempt, UnknownSession
from gymckpt.identity import EpisodeId
from gymckpt.participant.marks import Marks

MAX_RETIRED = 10_000
"""Retired sessions are remembered by id up to this many, so that their late requests are told the truth."""


@dataclass(eq=False, slots=True)
class Session:
    """One session. `session_id` is the one that tool calls carry (the cookie's)."""

    session_id: str
    episode: EpisodeId | None
    """None: seeded without an identity. Such a session is never in a checkpoint."""
    caller_id: str | None = None
    """The caller-assigned `resources_session_id`."""
    revision: int = 0
    """Raised by every request that may change the session."""
    seeded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its seed has ended, well or not."""
    restored: bool = False
    """Installed by a restore, and no request has come for it yet."""
    verified: bool = False
    closed: bool = False
    """Its end is recorded; it is freed as soon as no checkpoint is open."""
    state_bytes: int = 0
    """Size of its last export, 0 if it has had none."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The capture key, or the session id of a session without an episode."""
        return self.episode.capture_key if self.episode else self.session_id

    def __str__(self) -> str:
        return f"session {self.session_id}" + (f" of episode {self.episode}" if self.episode else "")


def cancel_once(task: asyncio.Task[Any]) -> None:
    """Cancel `task` unless it was already: a second cancel would break its clean-up."""
    if not task.done() and not task.cancelling():
        task.cancel()


class Sessions:
    """The table of sessions."""

    def __init__(self, instance: str, marks: Marks) -> None:
        self._instance = instance
        self._marks = marks
        self._by_id: dict[str, Session] = {}
        self._by_caller_id: dict[str, Session] = {}
        self._by_rollout: dict[str, dict[str, Session]] = {}
        self._retired: OrderedDict[str, EpisodeId | None] = OrderedDict()
        self._revisions = itertools.count(1)

    def add(self, session: Session) -> None:
        """Hold `session` from now on."""
        self._by_id[session.session_id] = session
        self._retired.pop(session.session_id, None)
        if session.caller_id is not None:
            self._by_caller_id[session.caller_id] = session
        if session.episode is not None:
            self._by_rollout.setdefault(session.episode.rollout_id, {})[session.session_id] = session
        self.touch(session)

    def remove(self, session: Session, *, retired: bool) -> None:
        """Hold it no more; safe to repeat. Late requests for a retired one are stale, for another one unknown."""
        if self._by_id.get(session.session_id) is session:
            del self._by_id[session.session_id]
        if session.caller_id is not None and self._by_caller_id.get(session.caller_id) is session:
            del self._by_caller_id[session.caller_id]
        if session.episode is not None:
            siblings = self._by_rollout.get(session.episode.rollout_id, {})
            siblings.pop(session.session_id, None)
            if not siblings:
                self._by_rollout.pop(session.episode.rollout_id, None)
        if retired:
            self._retired[session.session_id] = session.episode
            while len(self._retired) > MAX_RETIRED:
                self._retired.popitem(last=False)

    def touch(self, session: Session) -> None:
        """Raise the revision. Never the same twice, so that a later session is never taken for an earlier one."""
        session.revision = next(self._revisions)

    def get(self, session_id: str | None) -> Session | None:
        """The session, or None; says nothing about whether it may be used."""
        return self._by_id.get(session_id) if session_id is not None else None

    def of_caller(self, caller_id: str | None) -> Session | None:
        """The session that was seeded under this `resources_session_id`, or None."""
        return self._by_caller_id.get(caller_id) if caller_id is not None else None

    def usable(self, session_id: str | None, episode: EpisodeId | None = None) -> Session:
        """The session, for a request that names `episode` (or none).

        Raises `StaleAttempt` if it or its episode was retired or replaced, `UnknownSession` if it is not held here.
        """
        session = self.get(session_id)
        if session is None:
            if session_id is not None and session_id in self._retired:
                raise StaleAttempt(f"{self._instance}: session {session_id} was retired")
            raise UnknownSession(
                f"{self._instance} does not hold session {session_id!r}",
                hint="the server was started again, or the session has ended",
            )
        if session.episode is not None:
            self._marks.check(session.episode)
        if episode is not None and session.episode is not None and episode != session.episode:
            raise StaleAttempt(f"{self._instance}: {session} is not episode {episode}'s")
        return session

    def of_episode(self, episode: EpisodeId) -> Session:
        """The seeded session of this attempt; raises `StaleAttempt` if another one has its place, else
        `UnknownSession`."""
        self._marks.check(episode)
        sessions = self.of_rollout(episode.rollout_id)
        for session in sessions:
            if session.episode == episode and session.seeded.is_set():
                return session
        if any(session.episode is not None and session.episode > episode for session in sessions):
            raise StaleAttempt(f"{self._instance}: a later attempt of {episode} has a session here")
        raise UnknownSession(f"{self._instance} holds no session of {episode}")

    def of_rollout(self, rollout_id: str) -> list[Session]:
        """All attempts' sessions of a rollout."""
        return list(self._by_rollout.get(rollout_id, {}).values())

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def retired_count(self) -> int:
        """Retired sessions that are remembered."""
        return len(self._retired)
