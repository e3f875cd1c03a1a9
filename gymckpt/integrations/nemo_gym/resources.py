"""A Gym resources server as a participant: a layer around its app that does what our own resources servers do.

The session is bound to its episode at the seed and found by its cookie afterwards; requests wait while a checkpoint is
open; retired and unknown sessions are refused, so that a server which was started again never answers from an empty
session; the end of a session is carried out when no checkpoint is open.
"""

import logging
import uuid
from collections.abc import Callable

from gymckpt import jsoncodec
from gymckpt.errors import ControlError, GymckptError, StaleAttempt, Unauthorized
from gymckpt.identity import EpisodeId
from gymckpt.integrations.nemo_gym.adapters import Adapter
from gymckpt.integrations.nemo_gym.bodies import episode_in, object_in
from gymckpt.integrations.nemo_gym.cookies import renewed, session_id_of, with_session_id
from gymckpt.integrations.nemo_gym.exchange import Answer, Refused, ask, post_scope, read_body, with_content_length
from gymckpt.integrations.nemo_gym.mcp_tokens import McpTokens
from gymckpt.integrations.nemo_gym.paths import inner_scope
from gymckpt.participant.prefix import EPISODE, App, Receive, Scope, Send, error_body, send_json
from gymckpt.roles.resources_requests import SessionRequests
from gymckpt.roles.resources_sessions import Session
from gymckpt.wire.control import HEADER_COHORT, HEADER_RESTART, HEADER_VERIFY, PREFIX
from gymckpt.wire.gym import MCP_ACCESS_PATH, MCP_PATH, MCP_SESSION_HEADER

log = logging.getLogger(__name__)

UNCHANGING = frozenset({"GET", "HEAD", "OPTIONS"})
CALLER_ID = "resources_session_id"


class SessionLayer:
    """ASGI middleware between a Gym resources server's app and its callers. `refused` is told of every refusal."""

    def __init__(
        self,
        app: App,
        *,
        adapter: Adapter,
        requests: SessionRequests,
        cookie: str,
        tokens: McpTokens | None,
        typed_seeds: bool,
        keeps_prefix: bool,
        refused: Callable[[str, ControlError], None],
    ) -> None:
        self._app = app
        self._adapter = adapter
        self._requests = requests
        self._cookie = cookie
        self._tokens = tokens
        self._typed_seeds = typed_seeds
        self._keeps_prefix = keeps_prefix
        self._refused = refused
        self._seeds: dict[str, _Seeded] = {}
        adapter.close_inside = self._close_inside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._concerns(scope):
            await self._app(scope, receive, send)
            return
        try:
            answer = await self._answer(renewed(scope, self._cookie), await read_body(receive))
        except Refused as refused:
            answer = refused.answer
        except GymckptError as error:
            if isinstance(error, ControlError):
                self._refused(scope["path"][:200], error)
                await send_json(send, error.http_status, error_body(error))
            else:
                await send_json(send, error.http_status, {"error": {"code": error.code, "detail": error.detail}})
            return
        await answer.send(send)

    def _concerns(self, scope: Scope) -> bool:
        if scope["type"] != "http" or scope["method"] in UNCHANGING:
            return False
        path: str = scope["path"]
        return not path.startswith((PREFIX, MCP_ACCESS_PATH)) and path not in self._adapter.free_routes

    async def _answer(self, scope: Scope, body: bytes) -> Answer:
        path, episode = scope["path"], scope.get("state", {}).get(EPISODE)
        if path in self._adapter.seed_routes:
            return await self._seed(scope, body, episode)
        session_id, episode = self._named(scope, episode)
        if path == "/verify":
            return await self._requests.verify(session_id, episode, lambda _: self._successful(scope, body))
        if path in self._adapter.close_routes:
            return await self._close(scope, body, session_id, episode)
        answer = await self._requests.call(session_id, episode, lambda _: self._ask(scope, body))
        if path == "/step" and _is_over(answer):
            # The environment has ended the session itself; what is left of it goes with the next open gate.
            await self._requests.close_session(session_id, episode, None)
        return answer

    def _named(self, scope: Scope, episode: EpisodeId | None) -> tuple[str | None, EpisodeId | None]:
        """The session of a request, and the attempt that its path or its token names."""
        session_id, named = self._tokens.named(scope) if self._tokens is not None else (None, None)
        if session_id is None and self._tokens is not None and scope["path"].rstrip("/") == MCP_PATH:
            raise Unauthorized(
                f"{self._requests.instance}: no such session token ({MCP_SESSION_HEADER})",
                hint="the token is missing, or another server signed it",
            )
        if session_id is None:
            return session_id_of(scope, self._cookie), episode
        # The token goes first: a client that keeps cookies was given one by the first reply, of no session.
        if None not in (named, episode) and named != episode:
            raise StaleAttempt(f"{self._requests.instance}: the token is episode {named}'s, the path names {episode}")
        return session_id, episode or named

    async def _seed(self, scope: Scope, body: bytes, episode: EpisodeId | None) -> Answer:
        fields = object_in(body)
        episode = episode or episode_in(fields)
        caller_id = fields.get(CALLER_ID) if isinstance(fields.get(CALLER_ID), str) else None
        task_data = fields.get("task_data")
        translated = not self._typed_seeds and caller_id is not None
        if translated and isinstance(task_data, dict):
            # A class that reads its own flat fields at the seed gets them; what it did not ask for it ignores.
            body = jsoncodec.dumps({**fields, **task_data})

        async def work(session: Session) -> None:
            seeded = with_session_id(scope, self._cookie, session.session_id)
            answer = await self._successful(seeded, body)
            if translated:
                answer = _typed(answer, caller_id)
            if self._tokens is not None:
                answer = self._tokens.bound(answer, episode, typed=caller_id is not None)
            closes = self._typed_seeds and caller_id is not None and episode is not None
            self._seeds[session.session_id] = _Seeded(answer, caller_id if closes else None, episode)

        session = await self._requests.seed(str(uuid.uuid4()), episode, caller_id, work)
        headers = [(HEADER_VERIFY, str(self._adapter.checkpoint_verify))]
        if self._adapter.checkpoint_mode == "restart_only" or episode is None:
            headers.append((HEADER_RESTART, "1"))
        if self._adapter.compares_cohorts:
            headers.append((HEADER_COHORT, "1"))
        return self._seeds[session.session_id].answer.with_headers(headers)

    async def _close(self, scope: Scope, body: bytes, session_id: str | None, episode: EpisodeId | None) -> Answer:
        fields = object_in(body)
        caller_id = fields.get(CALLER_ID)
        if scope["path"] == "/close" and session_id is not None:
            await self._requests.call(session_id, episode, lambda _: self._ask(scope, body))
        await self._requests.close_session(
            session_id, episode or episode_in(fields), caller_id if isinstance(caller_id, str) else None
        )
        reply = jsoncodec.dumps({CALLER_ID: caller_id})
        return Answer(200, ((b"content-type", b"application/json"),), b"").with_body(reply)

    async def _close_inside(self, session_id: str) -> None:
        """The server's own close, for a session that was seeded in the typed way: only those promise to have one."""
        seeded = self._seeds.pop(session_id, None)
        if seeded is None or seeded.caller_id is None or seeded.episode is None:
            return
        reference = {"rollout_id": seeded.episode.rollout_id, "attempt": seeded.episode.attempt}
        body = jsoncodec.dumps({CALLER_ID: seeded.caller_id, "episode_id": reference})
        scope = with_session_id(post_scope("/close_session"), self._cookie, session_id)
        answer = await ask(self._app, with_content_length(scope, body), body)
        if answer.status >= 400:
            log.warning("%s: /close_session of %s answered %d", self._requests.instance, session_id, answer.status)

    async def _successful(self, scope: Scope, body: bytes) -> Answer:
        answer = await self._ask(scope, body)
        if answer.status >= 400:
            raise Refused(answer)
        return answer

    async def _ask(self, scope: Scope, body: bytes) -> Answer:
        return await ask(self._app, with_content_length(inner_scope(scope, self._keeps_prefix), body), body)


class _Seeded:
    """The answer to a session's seed, given again when the seed is, and what its close needs."""

    def __init__(self, answer: Answer, caller_id: str | None, episode: EpisodeId | None) -> None:
        self.answer = answer
        self.caller_id = caller_id
        self.episode = episode


def _typed(answer: Answer, caller_id: str | None) -> Answer:
    reply = {CALLER_ID: caller_id, "resources_tools": None, "sandbox_access": None}
    return answer.with_body(jsoncodec.dumps({**reply, **object_in(answer.body)}))


def _is_over(answer: Answer) -> bool:
    fields = object_in(answer.body) if answer.status == 200 else {}
    return fields.get("terminated") is True or fields.get("truncated") is True
