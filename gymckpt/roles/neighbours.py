"""Calls from one data-plane server to another: what may be sent again, what a refusal means, who takes part.

A request is sent again only if it provably began nothing: the connection was refused (for a few seconds, in case the
server is being started again), or the server said `checkpoint_parked` or `admission_closed` (until the deadline: it is
closed for a checkpoint). Anything else that goes wrong is the caller's failure, for example a server that was started
again empty and answers `unknown_session`.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gymckpt import jsoncodec
from gymckpt.errors import CONTROL_ERRORS, NOT_STARTED_CODES, NotSent, ServerError, UsageError
from gymckpt.ports import Clock, Deadline, Offload, Reply, ServerRef, Transport
from gymckpt.wire.client import excerpt
from gymckpt.wire.control import EXTENSION_MCP_ACCESS, EXTENSION_ROLLOUT_PREFIX, HEADER_RESTART, PREFIX

NOT_SENT_RETRY_S = 10.0
"""How long a server that refuses connections is tried."""
OFFLOADED_BYTES = 256 << 10
"""Replies larger than this are read off the event loop."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
PROBE_TIMEOUT_S = 10.0

_BAD_REQUEST = frozenset({400, 413, 422})


class NeighbourFailed(ServerError):
    """Another server failed a request. `kind` is its own code where it gave one; `terminal` if the same request would
    fail in the same way again."""

    def __init__(self, detail: str, *, kind: str = ServerError.code, terminal: bool = False) -> None:
        super().__init__(detail)
        self.kind = kind
        self.terminal = terminal


@dataclass(frozen=True, slots=True)
class Participation:
    """What a neighbour's control plane says about itself."""

    participant: bool
    """It takes part in checkpoints, and wants the rollout's prefix on requests."""
    captures: bool
    """It can capture its sessions; if not, every episode that uses it starts over after a crash."""
    fences: bool = False
    """It takes the rollout's prefix on every route, tools too, and refuses a dead attempt's requests by it."""
    renews_mcp: bool = False
    """It gives the MCP access of a restored session anew."""


ABSENT = Participation(participant=False, captures=False)


@dataclass
class Neighbourhood:
    """The other servers, by instance name. `control_token` None means that nobody is asked about checkpoints."""

    servers: Mapping[str, ServerRef]
    transport: Transport
    clock: Clock
    offload: Offload
    control_token: str | None = field(default=None, repr=False)
    _known: dict[str, Participation] = field(default_factory=dict)
    _asking: dict[str, asyncio.Lock] = field(default_factory=dict)

    def server(self, instance: str) -> ServerRef:
        """Where `instance` is; raises `UsageError`."""
        try:
            return self.servers[instance]
        except KeyError:
            raise UsageError(f"no server is called {instance[:160]!r} here") from None

    async def post(
        self,
        server: ServerRef,
        path: str,
        body: Any,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
        patience_s: float = NOT_SENT_RETRY_S,
    ) -> Reply:
        """The reply, whatever its status. Raises `NotSent` (after `patience_s`), `DeadlinePassed` or `ServerError`."""
        deadline = Deadline.after(self.clock, timeout_s)
        patience = deadline.earliest(patience_s)
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                reply = await self.transport.call(
                    server, "POST", path, body, deadline=deadline, headers=headers, cookies=cookies
                )
            except NotSent:
                self._known.pop(server.instance, None)
                if patience.passed:
                    raise
            except ServerError:
                self._known.pop(server.instance, None)
                raise
            else:
                if not _not_started(reply) or deadline.passed:
                    return reply
            await self.clock.sleep_until(min(self.clock.monotonic() + pause_s, deadline.at_s))
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def post_json(
        self,
        server: ServerRef,
        path: str,
        body: Any,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
        patience_s: float = NOT_SENT_RETRY_S,
        large: bool = False,
    ) -> tuple[dict[str, Any], Reply]:
        """The JSON object of a 2xx reply; raises `NeighbourFailed` for any other answer, else as `post` does.

        `large`: write the body off the event loop.
        """
        sent = await self.offload.run(lambda: jsoncodec.dumps(body)) if large else body
        reply = await self.post(
            server, path, sent, timeout_s=timeout_s, headers=headers, cookies=cookies, patience_s=patience_s
        )
        where = f"POST {path} on {server.instance}"
        if not 200 <= reply.status < 300:
            raise failure(reply, where)
        try:
            value = await self._loads(reply.body)
        except ValueError as error:
            raise NeighbourFailed(f"{where} answered no JSON: {error}", kind="bad_reply") from error
        if not isinstance(value, dict):
            raise NeighbourFailed(f"{where} answered a JSON {type(value).__name__}, not an object", kind="bad_reply")
        return value, reply

    async def _loads(self, body: bytes) -> Any:
        if len(body) > OFFLOADED_BYTES:
            return await self.offload.run(lambda: jsoncodec.loads(body))
        return jsoncodec.loads(body)

    async def participation(self, instance: str) -> Participation:
        """Whether `instance` takes part in checkpoints: asked once, and again after a connection to it failed.

        A server that cannot be asked is taken for one that does not, until the next time.
        """
        if self.control_token is None:
            return ABSENT
        async with self._asking.setdefault(instance, asyncio.Lock()):
            if instance not in self._known:
                answer = await self._ask(self.server(instance), self.control_token)
                if answer is None:
                    return ABSENT
                self._known[instance] = answer
            return self._known[instance]

    async def _ask(self, server: ServerRef, token: str) -> Participation | None:
        try:
            reply = await self.transport.call(
                server,
                "GET",
                PREFIX + "/status",
                deadline=Deadline.after(self.clock, PROBE_TIMEOUT_S),
                headers={"authorization": f"Bearer {token}"},
            )
        except ServerError:
            return None
        if reply.status == 404:
            return ABSENT
        if reply.status != 200:
            return None
        offered = _json_field(reply, "extensions")
        extensions = offered if isinstance(offered, list) else []
        return Participation(
            participant=True,
            captures=_json_field(reply, "mode") != "restart_only",
            fences=EXTENSION_ROLLOUT_PREFIX in extensions,
            renews_mcp=EXTENSION_MCP_ACCESS in extensions,
        )


def refusal(reply: Reply) -> tuple[str, str] | None:
    """Code and detail of a reply in the control plane's form of an error; None for any other reply."""
    if reply.status < 400:
        return None
    error = _json_field(reply, "error")
    if not isinstance(error, dict) or not isinstance(error.get("code"), str):
        return None
    return error["code"][:128], str(error.get("detail", ""))[:2000]


def failure(reply: Reply, where: str) -> NeighbourFailed:
    """What a reply other than 2xx means to the caller."""
    if (refused := refusal(reply)) is not None:
        code, detail = refused
        terminal = code not in CONTROL_ERRORS and _json_field(reply, "terminal") is True
        return NeighbourFailed(f"{where}: {code}: {detail}", kind=code, terminal=terminal)
    return NeighbourFailed(
        f"{where} answered HTTP {reply.status}: {excerpt(reply)}",
        kind=f"http_{reply.status}",
        terminal=reply.status in _BAD_REQUEST,
    )


def says_restart(reply: Reply) -> bool:
    """Whether a seed's reply says that this server cannot capture the session."""
    return says(reply, HEADER_RESTART)


def says(reply: Reply, header: str) -> bool:
    """Whether a reply carries this header with a value other than 0."""
    return reply.headers.get(header, "0") not in ("", "0")


def number_in(reply: Reply, header: str) -> int:
    """A count in a reply's header; 0 if it is missing or no plausible number."""
    text = reply.headers.get(header, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 12 else 0


def _not_started(reply: Reply) -> bool:
    refused = refusal(reply) if reply.status == 409 else None
    return refused is not None and refused[0] in NOT_STARTED_CODES


def _json_field(reply: Reply, name: str) -> Any:
    try:
        value = jsoncodec.loads(reply.body)
    except ValueError:
        return None
    return value.get(name) if isinstance(value, dict) else None
