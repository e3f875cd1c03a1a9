"""Gym's own environment and agent servers as participants: they hold an episode inside one handler.

Nothing of such an episode can be captured, so it is a restart: it never blocks a checkpoint and is never in one, it
runs on if nothing happens, and starts over after a crash. What they gain is that attempts can be retired here: stopped,
and refused from then on.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from gymckpt import jsoncodec
from gymckpt.errors import (
    CheckpointConflict,
    ControlError,
    GymckptError,
    InvalidCheckpointState,
    StaleAttempt,
    UnknownSession,
)
from gymckpt.identity import EpisodeId, Kind
from gymckpt.integrations.nemo_gym.bodies import episode_in, object_in
from gymckpt.integrations.nemo_gym.cookies import renewed, session_of
from gymckpt.integrations.nemo_gym.exchange import Answer, ask, post_scope, read_body, with_content_length
from gymckpt.integrations.nemo_gym.paths import inner_scope, plain_route
from gymckpt.participant.admission import Signal
from gymckpt.participant.marks import Marks
from gymckpt.participant.prefix import EPISODE, App, Receive, Scope, Send, error_body, send_json
from gymckpt.participant.role import Installable, RoleReport
from gymckpt.roles.resources_sessions import cancel_once
from gymckpt.storage.records import ExportedRecord, StoredRecord
from gymckpt.wire.control import HEADER_RESTART

log = logging.getLogger(__name__)

T = TypeVar("T")

AGENT_SESSION_ID = "agent_session_id"
SEED, CLOSE, ACTIVATE, RUN = "/v1/agent_sessions", "/v1/agent_sessions/close", "/v1/responses", "/run"


class OwnerRole:
    """`participant.role.Role` for a server whose episodes all start over: it never closes and never blocks."""

    def __init__(self, kind: Kind, instance: str, marks: Marks) -> None:
        self.kind: Kind = kind
        self.instance = instance
        self.marks = marks
        self.sessions: dict[str, EpisodeId] = {}
        """An agent's open sessions."""
        self.close_inside: Callable[[str, EpisodeId], Awaitable[None]] | None = None
        """Closes an agent session through the server's own route; set by whoever wraps it."""
        self._running: dict[asyncio.Task[Any], EpisodeId] = {}
        self._owned: set[EpisodeId] = set()
        self._frozen: frozenset[str] | None = None
        self._signal = Signal()

    async def work(self, episode: EpisodeId, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do `work` for `episode`, so that a retire can stop it; raises `StaleAttempt`."""
        self.marks.check(episode)
        task = asyncio.create_task(work())
        self._running[task] = episode
        self._signal.notify()
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancel_once(task)
            await asyncio.wait([task])
            raise
        finally:
            del self._running[task]
            self._signal.notify()
        if task.cancelled():
            raise StaleAttempt(f"{self.instance}: episode {episode} was retired while this request ran")
        return task.result()

    async def own(self, episode: EpisodeId, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """`work`, for the whole of an episode: once at a time; raises `CheckpointConflict`."""
        if episode in self._owned:
            raise CheckpointConflict(f"{self.instance}: episode {episode} is already running")
        self._owned.add(episode)
        try:
            return await self.work(episode, work)
        finally:
            self._owned.discard(episode)

    def close(self) -> None:
        self._frozen = self._keys()

    def open(self) -> None:
        self._frozen = None

    def report(self) -> RoleReport:
        self._signal.looked()
        restarts = self._keys() if self._frozen is None else self._frozen
        return RoleReport(counts={"running": len(self._running)}, restarts=sorted(restarts))

    async def changed(self) -> None:
        await self._signal.wait()

    def _keys(self) -> frozenset[str]:
        return frozenset(episode.capture_key for episode in (*self._running.values(), *self.sessions.values()))

    async def export(self, scope: Collection[EpisodeId] | None) -> AsyncIterator[ExportedRecord]:
        return
        yield  # what makes this a generator

    async def validate(self, records: AsyncIterator[StoredRecord]) -> Installable:
        async for stored in records:
            raise InvalidCheckpointState(f"{self.instance} captures no episodes and cannot restore {stored.episode}")
        return Installable((), None)

    async def install(self, installable: Installable, attempts: Mapping[str, int]) -> None:
        return

    async def drop_restored(self, keep: Collection[EpisodeId]) -> None:
        return

    async def suspend_compute(self, episodes: Collection[EpisodeId]) -> None:
        return

    async def wake_compute(self, episodes: Collection[EpisodeId]) -> None:
        return

    async def retire(self, episode: EpisodeId) -> None:
        covered = [task for task, mine in self._running.items() if _covers(episode, mine)]
        for task in covered:
            cancel_once(task)
        if covered:
            await asyncio.wait(covered)
        for key, mine in [(key, mine) for key, mine in self.sessions.items() if _covers(episode, mine)]:
            if self.close_inside is not None:
                await self.close_inside(key, mine)
            self.sessions.pop(key, None)

    def live(self) -> Collection[str]:
        return self._keys()

    def status(self) -> Mapping[str, Any]:
        kind = {"accepting": True} if self.kind == "agent" else {"restored_pending": 0}
        return {"mode": "restart_only", **kind}

    def commit_fields(self, exported: Sequence[EpisodeId]) -> Mapping[str, Any]:
        return {}


class OwnerLayer:
    """ASGI middleware around a Gym environment or agent server. `refused` is told of every refusal."""

    def __init__(self, app: App, *, role: OwnerRole, cookie: str, refused: Callable[[str, ControlError], None]) -> None:
        self._app = app
        self._role = role
        self._cookie = cookie
        self._refused = refused
        role.close_inside = self._close_inside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or plain_route(scope["path"]) not in (RUN, SEED, CLOSE, ACTIVATE):
            await self._app(scope, receive, send)
            return
        try:
            answer = await self._answer(renewed(scope, self._cookie), await read_body(receive))
        except ControlError as error:
            self._refused(scope["path"][:200], error)
            await send_json(send, error.http_status, error_body(error))
            return
        except GymckptError as error:
            await send_json(send, error.http_status, {"error": {"code": error.code, "detail": error.detail}})
            return
        await answer.send(send)

    async def _answer(self, scope: Scope, body: bytes) -> Answer:
        route, fields = plain_route(scope["path"]), object_in(body)
        episode: EpisodeId | None = scope.get("state", {}).get(EPISODE) or episode_in(fields)

        async def asked() -> Answer:
            return await ask(self._app, with_content_length(inner_scope(scope, keeps_prefix=True), body), body)

        key = fields.get(AGENT_SESSION_ID)
        if route == CLOSE:
            answer = await asked()
            if isinstance(key, str) and answer.status < 400:
                self._role.sessions.pop(key, None)
            return answer
        if route == ACTIVATE:
            key = session_of(scope, self._cookie).get(AGENT_SESSION_ID)
            if isinstance(key, str) and key not in self._role.sessions:
                raise UnknownSession(f"{self._role.instance} does not hold agent session {key!r}")
        if episode is None:
            return await asked()
        if route == RUN:
            return await self._role.own(episode, asked)
        answer = await self._role.work(episode, asked)
        if route == SEED and answer.status < 400:
            if isinstance(key, str):
                self._role.sessions[key] = episode
            answer = answer.with_headers([(HEADER_RESTART, "1")])
        return answer

    async def _close_inside(self, key: str, episode: EpisodeId) -> None:
        reference = {"rollout_id": episode.rollout_id, "attempt": episode.attempt}
        body = jsoncodec.dumps({AGENT_SESSION_ID: key, "episode_id": reference})
        answer = await ask(self._app, with_content_length(post_scope(CLOSE), body), body)
        if answer.status >= 400:
            log.warning("%s: closing agent session %s answered %d", self._role.instance, key, answer.status)


def _covers(retired: EpisodeId, episode: EpisodeId) -> bool:
    return episode.rollout_id == retired.rollout_id and episode <= retired
