"""Answers in the making on an inference worker: who asked, how far each has come, and what was made in vain."""

from collections import OrderedDict
from dataclasses import dataclass, field

from gymckpt.ports import Clock
from gymckpt.servers.worker_engine import Engine, FinishReason, Turn, TurnRequest
from gymckpt.servers.worker_format import Answer
from gymckpt.servers.worker_tokens import Token
from gymckpt.wire.responses import request_digest

FINISHED_TOKENS = 500_000
FINISHED_KEPT_S = 3600.0
"""How many tokens of finished answers, and how long, a cut can still ask for: one that is held until resume is long
finished."""


@dataclass(slots=True)
class Generation:
    """One call's answer, finished or not. `tokens` only grows."""

    model_call_id: str
    capture_key: str
    request_digest: str
    turn: Turn
    tokens: list[Token] = field(default_factory=list)
    continued: int = 0
    """How many of `tokens` came from a prefix."""
    lineage: tuple[str, ...] = ()
    """Staging keys of the prefixes that this answer continues, oldest first."""
    finish_reason: FinishReason | None = None
    ended_s: float = 0.0


class Generations:
    """All answers of one worker, by model call id where the caller gave one."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._active: dict[str, Generation] = {}
        self._finished: OrderedDict[str, Generation] = OrderedDict()
        self._finished_tokens = 0
        self.generated_tokens = 0
        self.continued_tokens = 0
        self.calls = 0

    @property
    def active(self) -> list[Generation]:
        """What is being made now, of callers that gave an id."""
        return list(self._active.values())

    def find(self, model_call_id: str) -> Generation | None:
        """The answer to that call, in the making or recently finished."""
        return self._active.get(model_call_id) or self._finished.get(model_call_id)

    async def begin(self, request: TurnRequest, model_call_id: str, capture_key: str) -> Generation:
        """Read the prompt."""
        digest = request_digest(request.route, request.body) if model_call_id else ""
        return Generation(model_call_id, capture_key, digest, await self._engine.begin(request))

    async def run(self, generation: Generation) -> Answer:
        """Make the answer from the tokens it has on; cancelling stops the engine."""
        self.calls += 1
        if generation.model_call_id:
            self._active[generation.model_call_id] = generation
        self.continued_tokens += generation.continued
        try:
            if generation.finish_reason is None:
                await self._make(generation)
            self._finish(generation)
        finally:
            if self._active.get(generation.model_call_id) is generation:
                del self._active[generation.model_call_id]
        assert generation.finish_reason is not None
        return Answer(
            generation.turn.text(generation.tokens),
            generation.tokens,
            generation.turn.prompt_token_ids,
            generation.finish_reason,
        )

    async def _make(self, generation: Generation) -> None:
        async for batch in generation.turn.tokens(tuple(generation.tokens)):
            generation.tokens.extend(batch)
            self.generated_tokens += len(batch)
        generation.finish_reason = generation.turn.finish_reason

    def _finish(self, generation: Generation) -> None:
        generation.ended_s = self._clock.monotonic()
        if generation.model_call_id and generation.model_call_id not in self._finished:
            self._finished[generation.model_call_id] = generation
            self._finished_tokens += len(generation.tokens)
        while self._finished:
            oldest = next(iter(self._finished.values()))
            if self._finished_tokens <= FINISHED_TOKENS and oldest.ended_s + FINISHED_KEPT_S > generation.ended_s:
                break
            self._finished.popitem(last=False)
            self._finished_tokens -= len(oldest.tokens)
