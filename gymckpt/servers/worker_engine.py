"""What an inference engine gives to the worker app: answers, token by token, from the start or from a prefix."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gymckpt.servers.worker_tokens import Token
from gymckpt.wire.responses import Route

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One call as the engine sees it."""

    route: Route
    body: dict[str, Any]
    conversation: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    seed: str


class Turn(Protocol):
    """One answer in the making."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...

    @property
    def output_limit(self) -> int:
        """The most tokens this answer may have."""
        ...

    def check_prefix(self, prefix: Sequence[Token]) -> None:
        """Raise `ValueError` if this answer cannot go on from `prefix`."""
        ...

    def tokens(self, prefix: Sequence[Token]) -> AsyncIterator[Sequence[Token]]:
        """What comes after `prefix`, in small batches as they are made; ends at the end of the answer or its limit."""
        ...

    def text(self, tokens: Sequence[Token]) -> str:
        """The text of `tokens` (see `worker_format` for its grammar)."""
        ...

    @property
    def finish_reason(self) -> FinishReason:
        """Why `tokens` ended; right only once it has."""
        ...


class Engine(Protocol):
    """A model that can be asked."""

    @property
    def model(self) -> str: ...

    @property
    def policy_version(self) -> str:
        """Changes whenever the weights do: a prefix made by another version is never continued."""
        ...

    async def begin(self, request: TurnRequest) -> Turn:
        """Read the prompt; generates nothing yet."""
        ...
