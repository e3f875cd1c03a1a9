"""`judged`: a judge model compares the answer with a reference; the judge may be slow."""

from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymckpt.errors import NotSent, ServerError, UsageError
from gymckpt.ports import Clock, Deadline, ServerRef, SystemClock, Transport
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.resources.app import resources_app
from gymckpt.servers.resources.options import read_options
from gymckpt.servers.resources.server import ResourcesServer, Verification
from gymckpt.servers.resources.texts import last_text
from gymckpt.settings import CheckpointSettings, Settings
from gymckpt.tasksets.judged import judge_prompt, verdict_of
from gymckpt.wire.client import HttpTransport, json_object
from gymckpt.wire.control import ResourcesMode, VerifyMode

_TRIES = 3
_PAUSE_S = 0.5
_MAX_CONNECTIONS = 1024


class JudgeData(BaseModel):
    """The fields of a task that this server reads."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    question: str = Field(max_length=1 << 20)
    expected_answer: str = Field(max_length=1 << 20)


class JudgedOptions(Settings):
    """Who judges, and how slowly."""

    judge: str = "policy_model"
    """Instance name of the server that is asked, at `/v1/responses`, without a capture key."""
    judge_model: str | None = None
    """The `model` of the request, where the judge wants one."""
    judge_delay_s: float = Field(default=0.0, ge=0.0, le=86_400.0)
    """Every verdict takes this much longer."""
    judge_timeout_s: float = Field(default=600.0, gt=0.0, le=86_400.0)


class Judged(ResourcesServer):
    """No state. Asking again is safe, though another judge might say something else."""

    checkpoint_mode: ClassVar[ResourcesMode] = "stateless"
    checkpoint_verify: ClassVar[VerifyMode] = "replay"

    def __init__(
        self,
        instance: str,
        options: JudgedOptions,
        judge: ServerRef,
        *,
        clock: Clock,
        transport: Transport | None = None,
    ) -> None:
        super().__init__(instance)
        self._options = options
        self._judge = judge
        self._clock = clock
        self._transport = transport
        self._own: HttpTransport | None = None

    async def startup(self) -> None:
        """Open the connections to the judge, unless a transport was given."""
        if self._transport is None:
            self._transport = self._own = HttpTransport(max_connections=_MAX_CONNECTIONS)

    async def shutdown(self) -> None:
        """Close them."""
        if self._own is not None:
            await self._own.aclose()

    async def verify(self, verification: Verification) -> dict[str, Any]:
        """`{"reward", "judge_text"}`; raises `ServerError` when the judge gives no verdict."""
        try:
            data = JudgeData.model_validate(verification.body)
        except ValidationError as error:
            raise UsageError(f"the task's data: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
        if self._options.judge_delay_s:
            await self._clock.sleep_until(self._clock.monotonic() + self._options.judge_delay_s)
        text = await self._ask(judge_prompt(data.question, data.expected_answer, last_text(verification.response)))
        verdict = verdict_of(text)
        if verdict is None:
            raise ServerError(f"{self._judge.instance} gave no verdict: {text[:200]!r}")
        return {"reward": 1.0 if verdict else 0.0, "judge_text": text}

    async def _ask(self, prompt: str) -> str:
        body: dict[str, Any] = {"input": [{"role": "user", "content": prompt}]}
        if self._options.judge_model:
            body["model"] = self._options.judge_model
        assert self._transport is not None, "startup was not called"
        deadline = Deadline.after(self._clock, self._options.judge_timeout_s)
        for left in reversed(range(_TRIES)):
            try:
                reply = await self._transport.call(self._judge, "POST", "/v1/responses", body, deadline=deadline)
                return last_text(json_object(reply, f"the judge {self._judge.instance}"))
            except NotSent:
                if not left:
                    raise
                await self._clock.sleep_until(self._clock.monotonic() + _PAUSE_S)
        raise AssertionError("unreachable")


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """See `servers.registry.Builder`; options are `JudgedOptions`."""
    settings = read_options(JudgedOptions, instance, options)
    clock = SystemClock()
    server = Judged(instance, settings, neighbours.ref(settings.judge), clock=clock)
    return resources_app(server, checkpoint, clock=clock)
