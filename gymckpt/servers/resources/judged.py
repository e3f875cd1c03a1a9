"""`judged`: a judge model compares the answer with a reference; the judge may be slow."""

from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymckpt.errors import ServerError, UsageError
from gymckpt.ports import Clock, ServerRef, SystemClock, Transport
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.resources.app import resources_app
from gymckpt.servers.resources.judge import Judge, JudgeOptions
from gymckpt.servers.resources.options import read_options
from gymckpt.servers.resources.server import ResourcesServer, Verification
from gymckpt.servers.resources.texts import last_text
from gymckpt.settings import CheckpointSettings
from gymckpt.tasksets.judged import judge_prompt, verdict_of
from gymckpt.wire.control import ResourcesMode, VerifyMode


class JudgeData(BaseModel):
    """The fields of a task that this server reads."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    question: str = Field(max_length=1 << 20)
    expected_answer: str = Field(max_length=1 << 20)


class JudgedOptions(JudgeOptions):
    """Who judges, and how slowly."""


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
        self._judge = Judge(options, judge, clock, transport)

    async def startup(self) -> None:
        """Open the connections to the judge, unless a transport was given."""
        self._judge.open()

    async def shutdown(self) -> None:
        """Close them."""
        await self._judge.close()

    async def verify(self, verification: Verification) -> dict[str, Any]:
        """`{"reward", "judge_text"}`; raises `ServerError` when the judge gives no verdict."""
        try:
            data = JudgeData.model_validate(verification.body)
        except ValidationError as error:
            raise UsageError(f"the task's data: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
        prompt = judge_prompt(data.question, data.expected_answer, last_text(verification.response))
        text = await self._judge.ask(prompt)
        verdict = verdict_of(text)
        if verdict is None:
            raise ServerError(f"{self._judge.instance} gave no verdict: {text[:200]!r}")
        return {"reward": 1.0 if verdict else 0.0, "judge_text": text}


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """See `servers.registry.Builder`; options are `JudgedOptions`."""
    settings = read_options(JudgedOptions, instance, options)
    clock = SystemClock()
    server = Judged(instance, settings, neighbours.ref(settings.judge), clock=clock)
    return resources_app(server, checkpoint, clock=clock)
