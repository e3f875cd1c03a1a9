"""The inference servers behind a policy model server: which one is asked, when again, and how many at a time.

An outage is waited out: a backend that refuses connections, or says that it is away or busy, is asked again, for as
long as settings allow. A generation has no effect but its answer, so one that broke in the middle is made again, a few
times: what breaks every backend that it meets is the call's own failure. Only the answer that is passed on counts.

A rollout stays with one backend for as long as that one is up, because its earlier tokens may be cached there; which
one is a function of the rollout's name, so nothing is remembered.
"""

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from gymckpt.errors import BackendUnavailable, DeadlinePassed, NotSent, ServerError
from gymckpt.ports import Clock, Deadline, Reply, ServerRef, Transport
from gymckpt.wire.client import excerpt, retry_after_s
from gymckpt.wire.responses import Route

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
HEALTH_TIMEOUT_S = 5.0
BREAKS_ALLOWED = 3
"""So often a backend may break under one call before that is taken for the call's own doing."""
AWAY = frozenset({429, 502, 503})
"""What a backend, or the gateway before it, says when nothing was begun: busy, or not there."""
BROKE = frozenset({500, 504})
"""What it says when something was begun and came to nothing."""

logger = logging.getLogger("gymckpt.model")


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """How backends are asked."""

    model: str | None = None
    """Name of the model to ask for; None leaves what the request says."""
    api_key: str | None = field(default=None, repr=False)
    call_timeout_s: float = 3600.0
    """The longest a call may take."""
    outage_patience_s: float = 3600.0
    """How long a call waits for backends that are all away or busy, within its own time."""
    max_concurrency: int = 0
    """Calls at the backends at a time, the rest waits here; 0: no limit."""
    health_interval_s: float = 10.0
    """How often each of several backends is asked whether it is alive."""


@dataclass(slots=True)
class Backend:
    """One inference server. `control` is where it serves generation cuts."""

    server: ServerRef
    control: ServerRef
    down_until_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    in_flight: int = 0
    serves_cuts: bool = True
    """Whether it may be asked for generation cuts; False once it has said that it serves none."""

    why: str = ""
    """What it said last while it was away."""

    @property
    def is_away(self) -> bool:
        """Whether it did not answer when it was asked last."""
        return self.down_until_s > 0.0

    def refused(self, now_s: float, why: str, asked_s: float = 0.0) -> None:
        """Leave it alone for a while, longer each time, and as long as it asked for."""
        self.down_until_s = now_s + max(self.pause_s, asked_s)
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        self.why = why

    def answered(self) -> None:
        """It is up."""
        self.down_until_s, self.pause_s = 0.0, FIRST_PAUSE_S


def backend(instance: str, url: str, control_url: str | None = None) -> Backend:
    """The backend at an OpenAI base URL, with or without `/v1` at its end."""
    root = url.rstrip("/").removesuffix("/v1")
    return Backend(ServerRef(instance, root), ServerRef(instance, (control_url or root).rstrip("/")))


class Backends:
    """See the module."""

    def __init__(
        self, backends: Sequence[Backend], transport: Transport, clock: Clock, settings: BackendSettings
    ) -> None:
        self.all = tuple(backends)
        self.settings = settings
        self._transport = transport
        self._clock = clock
        self._slots = asyncio.Semaphore(settings.max_concurrency) if settings.max_concurrency else None

    def chosen(self, rollout_id: str | None) -> Backend | None:
        """The backend for a call now, or None if all are down: the rollout's own, or else the least busy."""
        now_s = self._clock.monotonic()
        up = [backend for backend in self.all if backend.down_until_s <= now_s]
        if not up:
            return None
        if rollout_id is None:
            return min(up, key=lambda backend: backend.in_flight)
        return max(up, key=lambda backend: _weight(rollout_id, backend.server.url))

    async def call(
        self,
        route: Route,
        body: Mapping[str, Any],
        *,
        rollout_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        took: Callable[[Backend], None] | None = None,
    ) -> Reply:
        """The reply, whatever its status. `body` goes out unchanged but for `model`, and without `stream`. `took` is
        told which backend is being asked.

        Raises `BackendUnavailable` when all were away or busy for as long as settings allow, `DeadlinePassed`, or
        `ServerError` when connections broke in the middle again and again.
        """
        sent = {**body, "model": self.settings.model} if self.settings.model is not None else dict(body)
        sent.pop("stream", None)
        sent.pop("stream_options", None)
        async with AsyncExitStack() as stack:
            if self._slots is not None:
                await stack.enter_async_context(self._slots)
            return await self._send(route, sent, rollout_id, self._headers(headers), took)

    @property
    def away(self) -> int:
        """How many did not answer when they were asked last."""
        return sum(backend.is_away for backend in self.all)

    async def watch(self) -> None:
        """Ask each of several backends now and then whether it is alive; runs until cancelled."""
        while len(self.all) > 1:
            await self._clock.sleep_until(self._clock.monotonic() + self.settings.health_interval_s)
            await self.check()

    async def check(self) -> None:
        """Ask each backend once; one that does not answer in time gets no calls until it has answered again."""
        await asyncio.gather(*(self._check(backend) for backend in self.all))

    async def _send(
        self,
        route: Route,
        body: dict[str, Any],
        rollout_id: str | None,
        headers: dict[str, str],
        took: Callable[[Backend], None] | None,
    ) -> Reply:
        deadline = Deadline.after(self._clock, self.settings.call_timeout_s)
        patience: Deadline | None = None
        breaks = 0
        while True:
            backend = self.chosen(rollout_id)
            if backend is None:
                patience = patience or deadline.earliest(self.settings.outage_patience_s)
                await self._wait(patience)
                continue
            if took is not None:
                took(backend)
            outcome = await self._try(backend, route, body, headers, deadline)
            if isinstance(outcome, Reply) and outcome.status not in AWAY | BROKE:
                return outcome
            if _began(outcome):
                # It was up until now: an outage that begins here has its own time.
                patience, breaks = None, breaks + 1
                if breaks >= BREAKS_ALLOWED or deadline.passed:
                    return _given_up(outcome)
            patience = patience or deadline.earliest(self.settings.outage_patience_s)
            self._away(backend, outcome)

    async def _try(
        self, backend: Backend, route: Route, body: dict[str, Any], headers: dict[str, str], deadline: Deadline
    ) -> Reply | ServerError:
        try:
            return await self._exchange(backend, route, body, headers, deadline)
        except DeadlinePassed:
            raise
        except ServerError as error:
            return error

    async def _wait(self, patience: Deadline) -> None:
        """Until a backend may be asked again; raises `BackendUnavailable` when patience is over."""
        if patience.passed:
            told = "; ".join(f"{backend.server.url}: {backend.why}" for backend in self.all)
            raise BackendUnavailable(f"no backend answers: {told}")
        soon_s = self._clock.monotonic() + LONGEST_PAUSE_S
        await self._clock.sleep_until(min(patience.at_s, soon_s, *(b.down_until_s for b in self.all)))

    def _away(self, backend: Backend, outcome: Reply | ServerError) -> None:
        asked_s = 0.0
        if isinstance(outcome, Reply):
            why = f"HTTP {outcome.status}: {excerpt(outcome)}"
            asked_s = retry_after_s(outcome, self._clock.time()) or 0.0
        else:
            why = outcome.detail
        if not backend.is_away:
            logger.warning("backend %s is away or busy: %s", backend.server.url, why)
        backend.refused(self._clock.monotonic(), why, asked_s)

    async def _exchange(
        self, backend: Backend, route: Route, body: dict[str, Any], headers: dict[str, str], deadline: Deadline
    ) -> Reply:
        backend.in_flight += 1
        try:
            reply = await self._transport.call(backend.server, "POST", route, body, deadline=deadline, headers=headers)
        finally:
            backend.in_flight -= 1
        if reply.status not in AWAY:
            backend.answered()
        return self._without_key(reply)

    def _without_key(self, reply: Reply) -> Reply:
        """A backend that refuses may repeat what it was sent; the key goes into no log and to no caller."""
        key = self.settings.api_key
        if not key or 200 <= reply.status < 300:
            return reply
        return replace(reply, body=reply.body.replace(key.encode(), b"[the API key]"))

    async def _check(self, backend: Backend) -> None:
        deadline = Deadline.after(self._clock, HEALTH_TIMEOUT_S)
        try:
            await self._transport.call(
                backend.server, "GET", "/v1/models", deadline=deadline, headers=self._headers(None)
            )
            backend.answered()
        except ServerError as error:
            backend.down_until_s, backend.why = math.inf, error.detail

    def _headers(self, more: Mapping[str, str] | None) -> dict[str, str]:
        key = self.settings.api_key
        return {**({"authorization": f"Bearer {key}"} if key else {}), **(more or {})}


def _began(outcome: Reply | ServerError) -> bool:
    """Whether what came to nothing may have been begun there."""
    if isinstance(outcome, Reply):
        return outcome.status in BROKE
    return not isinstance(outcome, NotSent)


def _given_up(outcome: Reply | ServerError) -> Reply:
    if isinstance(outcome, ServerError):
        raise outcome
    return outcome


def _weight(rollout_id: str, url: str) -> bytes:
    return hashlib.blake2b(f"{url}\0{rollout_id}".encode(), digest_size=8).digest()
