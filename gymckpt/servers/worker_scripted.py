"""The scripted engine: its policy is a deterministic function of conversation and seed, its pace is settable.

Token ids and log probabilities are functions of the same two things, so that an answer continued from a prefix is the
answer that an undisturbed run would have given, token for token.
"""

import functools
import hashlib
import math
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from gymckpt import jsoncodec
from gymckpt.ports import Clock
from gymckpt.servers import worker_tokens
from gymckpt.servers.worker_engine import FinishReason, TurnRequest
from gymckpt.servers.worker_format import write
from gymckpt.servers.worker_tokens import Token
from gymckpt.settings import Settings
from gymckpt.tasksets.policy import decide
from gymckpt.wire.responses import output_limit

TICK_S = 0.02
"""Paced tokens come in batches about this far apart."""
_WORDS = ("so", "check", "that", "the", "order", "and", "stock", "agree", "with", "what", "was", "asked", "otherwise")


class ScriptedOptions(Settings):
    """How the scripted engine behaves. With the defaults it answers at once."""

    model: str = "scripted"
    policy_version: str = "scripted-1"
    tokens_per_second: float = Field(default=0.0, ge=0)
    """Pace of every answer; 0 means as fast as possible."""
    latency_s: float = Field(default=0.0, ge=0)
    """Mean time to the first token."""
    latency_spread: float = Field(default=0.0, ge=0, le=1)
    """0: always the mean; 1: exponentially distributed; the same conversation always waits equally long."""
    thought_tokens: tuple[int, int] = (0, 0)
    """Each answer begins with a thought of about this many tokens: at least, at most."""
    max_output_tokens: int = Field(default=32_768, ge=1)
    staging_dir: Path | None = None
    """Where generation cuts are staged; None: a temporary directory for the life of the process."""


class ScriptedEngine:
    """See the module."""

    def __init__(self, options: ScriptedOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock

    @property
    def model(self) -> str:
        return self._options.model

    @property
    def policy_version(self) -> str:
        return self._options.policy_version

    async def begin(self, request: TurnRequest) -> "ScriptedTurn":
        """Decide what to say; the pace begins with the first token asked for."""
        told = [_told(item) for item in request.conversation]
        source = hashlib.sha256(jsoncodec.canonical([request.seed, told])).hexdigest()
        decision = decide(request.conversation, request.tools, request.seed)
        prompt = [token for part in told for token in _prompt_tokens(jsoncodec.dumps(part))]
        answer = worker_tokens.encode(write(decision, self._thought(source)))
        limit = min(output_limit(request.body) or self._options.max_output_tokens, self._options.max_output_tokens)
        return ScriptedTurn(self._options, self._clock, source, prompt, answer, limit)

    def _thought(self, source: str) -> str:
        least, most = self._options.thought_tokens
        if most <= 0:
            return ""
        drawn = _drawn(source + "/thought", most + 1)
        wanted = least + round(drawn[0] * max(0, most - least))
        words: list[str] = []
        tokens = 0
        while tokens < wanted:
            words.append(_WORDS[int(drawn[len(words) + 1] * len(_WORDS))])
            tokens += worker_tokens.count(f" {words[-1]}")
        return " ".join(words)


class ScriptedTurn:
    """One answer of the scripted engine, known from its beginning and given out at its pace."""

    def __init__(
        self,
        options: ScriptedOptions,
        clock: Clock,
        source: str,
        prompt: list[int],
        answer: list[int],
        limit: int,
    ) -> None:
        self.prompt_token_ids: Sequence[int] = prompt
        self.output_limit = limit
        self.finish_reason: FinishReason = "stop" if len(answer) <= limit else "length"
        self._options = options
        self._clock = clock
        self._source = source
        self._answer = answer[:limit]

    def check_prefix(self, prefix: Sequence[Token]) -> None:
        """Raise `ValueError` if the answer does not begin with `prefix`."""
        if worker_tokens.ids_of(prefix) != self._answer[: len(prefix)]:
            raise ValueError("the answer to this conversation does not begin with the prefix")

    async def tokens(self, prefix: Sequence[Token]) -> AsyncIterator[Sequence[Token]]:
        """The rest of the answer after `prefix`."""
        drawn = _drawn(self._source + "/logprobs", len(self._answer))
        whole = [Token(token, -round(chance, 6)) for token, chance in zip(self._answer, drawn, strict=True)]
        rest = whole[len(prefix) :]
        pace = self._options.tokens_per_second
        start_s = self._clock.monotonic() + (0.0 if prefix else self._latency_s())
        if not pace:
            await self._clock.sleep_until(start_s)
            if rest:
                yield rest
            return
        batch = max(1, math.ceil(pace * TICK_S))
        for position in range(0, len(rest), batch):
            given = rest[position : position + batch]
            await self._clock.sleep_until(start_s + (position + len(given)) / pace)
            yield given

    def text(self, tokens: Sequence[Token]) -> str:
        return worker_tokens.decode(token.id for token in tokens)

    def _latency_s(self) -> float:
        mean, spread = self._options.latency_s, self._options.latency_spread
        drawn = -math.log(1.0 - _drawn(self._source + "/latency", 1)[0])
        return mean * (1 - spread + spread * min(drawn, 10.0))


def _drawn(source: str, count: int) -> list[float]:
    """`count` numbers in [0, 1) that are a function of `source`."""
    data = hashlib.shake_128(source.encode()).digest(4 * count)
    return [value / 2**32 for (value,) in struct.iter_unpack(">I", data)]


@functools.lru_cache(maxsize=4096)
def _prompt_tokens(part: bytes) -> tuple[int, ...]:
    # A conversation comes again with every turn, one round longer: its earlier parts need no second look.
    return tuple(worker_tokens.encode(part.decode() + "\n"))


def _told(item: dict[str, Any]) -> dict[str, Any]:
    """What the model is told by an item: everything but ids and what only trainers read."""
    left_out = ("id", "call_id", "status", "prompt_token_ids", "generation_token_ids", "generation_log_probs")
    return {name: value for name, value in item.items() if name not in left_out and value is not None}
