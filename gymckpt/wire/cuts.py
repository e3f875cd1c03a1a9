"""Generation cuts on the wire: what a policy model server asks an inference worker, and what it believes of the reply.

`POST /ng-control/v1/generation-cut` with an inventory of calls in flight; the worker stages each call's tokens durably
and says so. A receipt that does not fit the inventory in every respect is worth nothing.
"""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gymckpt.identity import MAX_ATTEMPT, EpisodeId
from gymckpt.wire.control import Answer, CheckpointId, Message, RolloutId
from gymckpt.wire.responses import digest

CUT_PATH = "/ng-control/v1/generation-cut"
STAGED_PATH = "/ng-control/v1/staged-prefixes"
"""Ours: a `StagedRequest` gives `{"prefixes": [...]}`, staged prefixes with their tokens (`PrefixClaim` or null)."""

HEADER_MODEL_CALL = "x-ng-model-call"
"""On calls to a worker: the model call id that an inventory will name."""
HEADER_CAPTURE_KEY = "x-ng-capture-key"
"""On calls to a worker: the episode that the call belongs to."""
HEADER_POLICY_VERSION = "x-ng-policy-version"
"""On a worker's reply: which weights made it."""
PREFIX_FIELD = "generation_prefix"
"""In the body of a call to a worker: the prefix to continue, a `PrefixClaim`."""
HEADER_CONTINUED = "x-ng-continued-tokens"
"""On a worker's reply: how many tokens of the answer came from a prefix."""

CutKind = Literal["active_prefix", "terminal_completion"]
FinishReason = Literal["stop", "length"]
MAX_TICKETS = 100_000
MAX_STAGED_KEYS = 64
"""Prefixes that are given at a time: some megabytes."""
MAX_PREFIX_TOKENS = 1 << 22


class Ticket(Message):
    """One call in flight."""

    ticket_id: str = Field(min_length=1, max_length=256)
    rollout_id: RolloutId
    attempt: int = Field(ge=0, le=MAX_ATTEMPT)
    model_call_id: str = Field(min_length=1, max_length=256)
    admitted_at: float = Field(allow_inf_nan=False)

    @property
    def episode(self) -> EpisodeId:
        return EpisodeId(self.rollout_id, self.attempt)


class CutRequest(Message):
    """The inventory, sorted by ticket, and its digest."""

    checkpoint_id: CheckpointId
    server_name: str = Field(min_length=1, max_length=256)
    active_prefixes: list[Ticket] = Field(max_length=MAX_TICKETS)
    inventory_digest: str = Field(pattern=r"^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [ticket.ticket_id for ticket in self.active_prefixes]
        if names != sorted(set(names)):
            raise ValueError("active_prefixes must be sorted by ticket_id, each once")
        if self.inventory_digest != inventory_digest(self.checkpoint_id, self.server_name, self.active_prefixes):
            raise ValueError("inventory_digest does not fit the inventory")
        return self

    @classmethod
    def of(cls, checkpoint_id: str, server_name: str, tickets: Sequence[Ticket]) -> Self:
        """The request for `tickets`, in order and with its digest."""
        ordered = sorted(tickets, key=lambda ticket: ticket.ticket_id)
        return cls(
            checkpoint_id=checkpoint_id,
            server_name=server_name,
            active_prefixes=ordered,
            inventory_digest=inventory_digest(checkpoint_id, server_name, ordered),
        )


class CutPrefix(Answer):
    """What became of one ticket."""

    ticket_id: str
    rollout_id: str
    attempt: int
    model_call_id: str
    admitted_at: float
    disposition: Literal["durable_prefix", "durable_failure"]
    cut_kind: CutKind | None = None
    frozen_buffer_id: str | None = None
    staging_keys: list[str] | None = None
    prefix_token_count: int | None = Field(default=None, ge=0, le=MAX_PREFIX_TOKENS)
    prefix_digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    effective_output_limit: int | None = Field(default=None, ge=1)
    terminal_stop_reason: str | None = None
    terminal_finish_reason: FinishReason | None = None
    failure: str | None = None
    """Ours: why, for people."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        durable = (
            self.cut_kind,
            self.frozen_buffer_id,
            self.staging_keys,
            self.prefix_token_count,
            self.prefix_digest,
            self.effective_output_limit,
        )
        if self.disposition == "durable_failure":
            if any(value is not None for value in (*durable, self.terminal_stop_reason, self.terminal_finish_reason)):
                raise ValueError("a durable_failure carries no prefix")
            return self
        if any(value is None for value in durable):
            raise ValueError("a durable_prefix names kind, buffer, staging keys, count, digest and output limit")
        if not self.staging_keys or len(set(self.staging_keys)) != len(self.staging_keys):
            raise ValueError("staging_keys must be unique, and at least one")
        if (self.prefix_token_count or 0) > (self.effective_output_limit or 0):
            raise ValueError("prefix_token_count is beyond effective_output_limit")
        if self.terminal_stop_reason is not None and self.terminal_finish_reason is None:
            raise ValueError("terminal_stop_reason requires terminal_finish_reason")
        if (self.cut_kind == "terminal_completion") != (self.terminal_finish_reason is not None):
            raise ValueError("terminal_finish_reason belongs to a terminal_completion, and to nothing else")
        return self

    @property
    def ticket(self) -> Ticket:
        """The ticket that this prefix repeats; raises `ValueError` if it is none."""
        return Ticket(
            ticket_id=self.ticket_id,
            rollout_id=self.rollout_id,
            attempt=self.attempt,
            model_call_id=self.model_call_id,
            admitted_at=self.admitted_at,
        )


class CutReceipt(Answer):
    """The worker's reply."""

    checkpoint_id: str
    cut_id: str = Field(min_length=1, max_length=256)
    inventory_digest: str
    inventory: list[Ticket]
    backend_snapshot_id: str = Field(min_length=1, max_length=256)
    """Which weights made the tokens."""
    prefixes: list[CutPrefix]


class PrefixSource(Message):
    """The call that a prefix was cut from."""

    rollout_id: RolloutId
    attempt: int = Field(ge=0, le=MAX_ATTEMPT)
    model_call_id: str = Field(min_length=1, max_length=256)


class PrefixClaim(Message):
    """A prefix on its way back to a worker: what it must be, and its tokens as the checkpoint holds them."""

    staging_keys: list[str] = Field(min_length=1, max_length=1024)
    source: PrefixSource
    request_digest: str
    prompt_digest: str
    prefix_digest: str
    prefix_token_count: int = Field(ge=0, le=MAX_PREFIX_TOKENS)
    lineage: list[str] = Field(default_factory=list)
    policy_version: str
    effective_output_limit: int = Field(ge=1)
    finish_reason: FinishReason | None = None
    token_ids: list[int] = Field(max_length=MAX_PREFIX_TOKENS)
    log_probs: list[float] = Field(max_length=MAX_PREFIX_TOKENS)


class StagedRequest(Message):
    """Which staged prefixes to give."""

    staging_keys: list[str] = Field(min_length=1, max_length=MAX_STAGED_KEYS)


class StagedReply(Answer):
    """The prefixes, in the order asked for."""

    prefixes: list[PrefixClaim | None]


def inventory_digest(checkpoint_id: str, server_name: str, tickets: Sequence[Ticket]) -> str:
    """SHA-256 over the canonical JSON of an inventory."""
    return digest(
        {
            "checkpoint_id": checkpoint_id,
            "server_name": server_name,
            "active_prefixes": [ticket.model_dump() for ticket in tickets],
        }
    )


def prefix_digest(token_ids: Sequence[int], log_probs: Sequence[float]) -> str:
    """SHA-256 over the canonical JSON of a prefix's tokens."""
    return digest({"token_ids": list(token_ids), "log_probs": list(log_probs)})


def receipt_problem(request: CutRequest, receipt: CutReceipt) -> str | None:
    """Why `receipt` is no answer to `request`, or None: it equals the inventory and covers every ticket once."""
    if receipt.checkpoint_id != request.checkpoint_id:
        return f"it is for checkpoint {receipt.checkpoint_id[:160]!r}"
    if receipt.inventory_digest != request.inventory_digest:
        return "its inventory_digest is another"
    if receipt.inventory != request.active_prefixes:
        return "its inventory is another"
    given = [prefix.ticket_id for prefix in receipt.prefixes]
    if len(set(given)) != len(given):
        return "a ticket is covered twice"
    asked = {ticket.ticket_id: ticket for ticket in request.active_prefixes}
    if missing := asked.keys() - set(given):
        return f"ticket {min(missing)!r} is not covered"
    for prefix in receipt.prefixes:
        if prefix.ticket_id not in asked:
            return f"ticket {prefix.ticket_id[:160]!r} was not asked for"
        if _identity(prefix) != _identity(asked[prefix.ticket_id]):
            return f"ticket {prefix.ticket_id!r} has another identity"
    keys = [key for prefix in receipt.prefixes for key in prefix.staging_keys or ()]
    if len(set(keys)) != len(keys):
        return "a staging key is given twice"
    return None


def _identity(ticket: Ticket | CutPrefix) -> tuple[Any, ...]:
    return ticket.rollout_id, ticket.attempt, ticket.model_call_id, ticket.admitted_at
