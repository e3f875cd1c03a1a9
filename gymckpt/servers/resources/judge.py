"""Asking a judge model, at `/v1/responses`, outside any rollout."""

from typing import Any

from pydantic import Field

from gymckpt.errors import NotSent
from gymckpt.ports import Clock, Deadline, ServerRef, Transport
from gymckpt.servers.resources.texts import last_text
from gymckpt.settings import Settings
from gymckpt.wire.client import HttpTransport, json_object

_TRIES = 3
_PAUSE_S = 0.5
_MAX_CONNECTIONS = 1024


class JudgeOptions(Settings):
    """Who judges, and how slowly."""

    judge: str = "policy_model"
    """Instance name of the server that is asked, at `/v1/responses`, without a capture key."""
    judge_model: str | None = None
    """The `model` of the request, where the judge wants one."""
    judge_delay_s: float = Field(default=0.0, ge=0.0, le=86_400.0)
    """Every verdict takes this much longer."""
    judge_timeout_s: float = Field(default=600.0, gt=0.0, le=86_400.0)


class Judge:
    """A judge model. Calls carry no capture key, so that no checkpoint ever holds them up."""

    def __init__(self, options: JudgeOptions, server: ServerRef, clock: Clock, transport: Transport | None) -> None:
        self.instance = server.instance
        self._options = options
        self._server = server
        self._clock = clock
        self._transport = transport
        self._own: HttpTransport | None = None

    def open(self) -> None:
        """Open the connections, unless a transport was given."""
        if self._transport is None:
            self._transport = self._own = HttpTransport(max_connections=_MAX_CONNECTIONS)

    async def close(self) -> None:
        """Close them."""
        if self._own is not None:
            await self._own.aclose()

    async def ask(self, prompt: str) -> str:
        """What the judge says. Raises `ServerError` when it cannot be reached or answers nothing of use."""
        if self._options.judge_delay_s:
            await self._clock.sleep_until(self._clock.monotonic() + self._options.judge_delay_s)
        body: dict[str, Any] = {"input": [{"role": "user", "content": prompt}]}
        if self._options.judge_model:
            body["model"] = self._options.judge_model
        assert self._transport is not None, "open was not called"
        deadline = Deadline.after(self._clock, self._options.judge_timeout_s)
        for left in reversed(range(_TRIES)):
            try:
                reply = await self._transport.call(self._server, "POST", "/v1/responses", body, deadline=deadline)
                return last_text(json_object(reply, f"the judge {self.instance}"))
            except NotSent:
                if not left:
                    raise
                await self._clock.sleep_until(self._clock.monotonic() + _PAUSE_S)
        raise AssertionError("unreachable")
