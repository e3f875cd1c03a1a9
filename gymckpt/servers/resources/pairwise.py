"""`pairwise`: all answers to one prompt are compared, each with each other one, by a judge model.

The reward of an answer is the share of its comparisons that it wins, a tie counting half. An answer's verification
waits for those of its siblings, so a checkpoint must not wait for it: it is replayed, and after a crash the whole
cohort is verified again.
"""

import asyncio
import hashlib
import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import ServerError, UsageError
from gymckpt.identity import EpisodeId
from gymckpt.ports import Clock, ServerRef, SystemClock, Transport
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.resources.app import resources_app
from gymckpt.servers.resources.cohort import Cohorts
from gymckpt.servers.resources.judge import Judge, JudgeOptions
from gymckpt.servers.resources.options import read_options
from gymckpt.servers.resources.server import ResourcesServer, Verification
from gymckpt.servers.resources.texts import last_text
from gymckpt.settings import CheckpointSettings
from gymckpt.tasksets.pairwise import judge_prompt, score_of
from gymckpt.wire.control import ResourcesMode, VerifyMode

MAX_COHORT = 64


class PairwiseData(BaseModel):
    """The fields of a task that this server reads."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    question: str = Field(max_length=1 << 20)
    cohort: str | None = Field(default=None, max_length=512)
    """What siblings have in common; by default, their prompt."""
    cohort_size: int | None = Field(default=None, ge=2, le=MAX_COHORT)


class PairwiseOptions(JudgeOptions):
    """Who judges, and who is compared."""

    cohort_size: int | None = Field(default=None, ge=2, le=MAX_COHORT)
    """How many answers make a cohort: rows that share it, times repeats. Overrides what a task says."""
    cohort_timeout_s: float = Field(default=3600.0, gt=0.0, le=7 * 86_400.0)
    """An answer whose siblings have not all come by then fails."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    question: str
    text: str


class Pairwise(ResourcesServer):
    """No state: who waits here is known by its episode alone."""

    checkpoint_mode: ClassVar[ResourcesMode] = "stateless"
    checkpoint_verify: ClassVar[VerifyMode] = "replay"
    compares_cohorts: ClassVar[bool] = True

    def __init__(
        self,
        instance: str,
        options: PairwiseOptions,
        judge: ServerRef,
        *,
        clock: Clock,
        transport: Transport | None = None,
    ) -> None:
        super().__init__(instance)
        self._options = options
        self._judge = Judge(options, judge, clock, transport)
        self._cohorts = Cohorts[_Candidate, float](self._compare, clock, options.cohort_timeout_s)

    async def startup(self) -> None:
        """Open the connections to the judge, unless a transport was given."""
        self._judge.open()

    async def shutdown(self) -> None:
        """Stop comparing, and close them."""
        await self._cohorts.close()
        await self._judge.close()

    async def verify(self, verification: Verification) -> dict[str, Any]:
        """`{"reward", "cohort_size"}`, once all of the cohort are there."""
        try:
            data = PairwiseData.model_validate(verification.body)
        except ValidationError as error:
            raise UsageError(f"the task's data: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
        size = self._options.cohort_size or data.cohort_size
        if size is None:
            raise UsageError(f"{self.instance}: neither the task nor the option cohort_size says how large a cohort is")
        member = verification.episode or EpisodeId(verification.session_id or uuid.uuid4().hex)
        candidate = _Candidate(data.question, last_text(verification.response))
        reward = await self._cohorts.verdict(data.cohort or _prompt(verification.body), size, member, candidate)
        return {"reward": reward, "cohort_size": size}

    async def _compare(self, candidates: Mapping[str, _Candidate]) -> Mapping[str, float]:
        pairs = list(itertools.combinations(candidates, 2))
        won = dict.fromkeys(candidates, 0.0)
        scores = await asyncio.gather(
            *(self._score(candidates[a], candidates[b]) for a, b in pairs), return_exceptions=True
        )
        for (a, b), score in zip(pairs, scores, strict=True):
            if isinstance(score, BaseException):
                raise score
            won[a] += score
            won[b] += 1.0 - score
        return {name: total / (len(candidates) - 1) for name, total in won.items()}

    async def _score(self, first: _Candidate, second: _Candidate) -> float:
        text = await self._judge.ask(judge_prompt(first.question, first.text, second.text))
        score = score_of(text)
        if score is None:
            raise ServerError(f"{self._judge.instance} gave no verdict: {text[:200]!r}")
        return score


def _prompt(body: Mapping[str, Any]) -> str:
    params = body.get("responses_create_params")
    said = params.get("input") if isinstance(params, dict) else None
    return hashlib.sha256(jsoncodec.canonical(said)).hexdigest()


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """See `servers.registry.Builder`; options are `PairwiseOptions`."""
    settings = read_options(PairwiseOptions, instance, options)
    clock = SystemClock()
    server = Pairwise(instance, settings, neighbours.ref(settings.judge), clock=clock)
    return resources_app(server, checkpoint, clock=clock)
