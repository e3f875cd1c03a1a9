"""Generation cuts on the policy model server: ask each worker at commit, believe only what fits, use it once.

A cut is optional and never blocks: whatever goes wrong with one means that its call is generated again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import GymckptError, ServerError
from gymckpt.identity import EpisodeId
from gymckpt.ports import Clock, Deadline, Offload, Reply, Transport
from gymckpt.roles.ledger_rows import CallFacts
from gymckpt.roles.model_backends import Backend
from gymckpt.wire.cuts import (
    CUT_PATH,
    MAX_STAGED_KEYS,
    STAGED_PATH,
    CutPrefix,
    CutReceipt,
    CutRequest,
    PrefixClaim,
    StagedReply,
    StagedRequest,
    Ticket,
    prefix_digest,
    receipt_problem,
)

M = TypeVar("M", bound=BaseModel)

TOKEN_FIELDS = ("token_ids", "log_probs")

logger = logging.getLogger("gymckpt.model")


class Cut(BaseModel):
    """One cut as the record holds it: what was acknowledged, and the prefix with its tokens."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    cut_id: str
    backend_snapshot_id: str
    call_index: int
    prefix: CutPrefix
    claim: PrefixClaim

    @property
    def request_digest(self) -> str:
        """The call that may use it."""
        return self.claim.request_digest

    def without_tokens(self) -> dict[str, Any]:
        """The cut as it stands in a record."""
        return self.model_dump(exclude={"claim": set(TOKEN_FIELDS)})

    def tokens(self) -> dict[str, Any]:
        """Its tokens, as they are kept beside the records."""
        return {name: getattr(self.claim, name) for name in TOKEN_FIELDS}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A call whose tokens are wanted."""

    episode: EpisodeId
    facts: CallFacts
    backend: Backend

    @property
    def ticket(self) -> Ticket:
        return Ticket(
            ticket_id=f"{self.episode.capture_key}/{self.facts.call_id}",
            rollout_id=self.episode.rollout_id,
            attempt=self.episode.attempt,
            model_call_id=self.facts.call_id,
            admitted_at=self.facts.admitted_at,
        )


@dataclass
class CutTaker:
    """Takes the cuts of one policy model server. `counts` says how they went."""

    server_name: str
    transport: Transport
    clock: Clock
    offload: Offload
    token: str = field(repr=False)
    counts: Counter[str] = field(default_factory=Counter)

    async def take(
        self, checkpoint_id: str, candidates: Sequence[Candidate], deadline: Deadline
    ) -> Mapping[EpisodeId, Cut]:
        """The cuts that can be believed, one an episode (latest admitted wins), in at most half of the time left."""
        latest: dict[EpisodeId, Candidate] = {}
        for candidate in sorted(candidates, key=lambda one: (one.facts.admitted_at, one.facts.call_id)):
            latest[candidate.episode] = candidate
        by_backend: dict[str, list[Candidate]] = {}
        for candidate in latest.values():
            if not candidate.backend.serves_cuts:
                continue
            by_backend.setdefault(candidate.backend.server.url, []).append(candidate)
        limit = deadline.earliest(deadline.remaining_s / 2)
        taken = await asyncio.gather(*(self._at(checkpoint_id, group, limit) for group in by_backend.values()))
        return {episode: cut for found in taken for episode, cut in found.items()}

    async def _at(self, checkpoint_id: str, candidates: Sequence[Candidate], limit: Deadline) -> dict[EpisodeId, Cut]:
        found: dict[EpisodeId, Cut] = {}
        backend = candidates[0].backend
        try:
            async with asyncio.timeout(limit.remaining_s):
                receipt = await self._receipt(checkpoint_id, candidates, limit)
                await self._fetch(receipt, candidates, limit, found)
        except (GymckptError, TimeoutError) as error:
            # What was fetched whole before stays good.
            self._note("cuts_failed", len(candidates) - len(found), f"{backend.control.url}: {error or 'too slow'}")
        self.counts["cuts_taken"] += len(found)
        return found

    async def _receipt(self, checkpoint_id: str, candidates: Sequence[Candidate], limit: Deadline) -> CutReceipt:
        request = CutRequest.of(checkpoint_id, self.server_name, [candidate.ticket for candidate in candidates])
        reply = await self._post(candidates[0].backend, CUT_PATH, request.model_dump(), limit)
        if reply.status in (404, 405):
            candidates[0].backend.serves_cuts = False
            raise ServerError("it serves no generation cuts, and is not asked again")
        _check_status(CUT_PATH, reply)
        receipt = await self._parsed(CutReceipt, reply)
        if problem := receipt_problem(request, receipt):
            raise ServerError(f"the receipt cannot be believed: {problem}")
        return receipt

    async def _fetch(
        self, receipt: CutReceipt, candidates: Sequence[Candidate], limit: Deadline, found: dict[EpisodeId, Cut]
    ) -> None:
        """Copy the tokens of what was acknowledged into `found`, checked against the acknowledgement."""
        by_ticket = {candidate.ticket.ticket_id: candidate for candidate in candidates}
        durable = []
        for prefix in receipt.prefixes:
            if prefix.staging_keys:
                durable.append((prefix, prefix.staging_keys[-1]))
            else:
                self._note("cuts_failed", 1, f"{prefix.ticket_id}: {prefix.failure or 'durable_failure'}")
        for start in range(0, len(durable), MAX_STAGED_KEYS):
            batch = durable[start : start + MAX_STAGED_KEYS]
            request = StagedRequest(staging_keys=[key for _, key in batch])
            reply = await self._post(candidates[0].backend, STAGED_PATH, request.model_dump(), limit)
            _check_status(STAGED_PATH, reply)
            staged = await self._parsed(StagedReply, reply)
            if len(staged.prefixes) != len(batch):
                raise ServerError(f"{len(staged.prefixes)} staged prefixes came for {len(batch)} keys")
            for (prefix, _), claim in zip(batch, staged.prefixes, strict=True):
                candidate = by_ticket[prefix.ticket_id]
                weights = receipt.backend_snapshot_id
                problem = await self.offload.run(partial(claim_problem, claim, prefix, candidate, weights))
                if problem is not None or claim is None:
                    self._note("cuts_failed", 1, f"{prefix.ticket_id}: {problem}")
                    continue
                found[candidate.episode] = Cut(
                    cut_id=receipt.cut_id,
                    backend_snapshot_id=receipt.backend_snapshot_id,
                    call_index=candidate.facts.index,
                    prefix=prefix,
                    claim=claim,
                )

    async def _post(self, backend: Backend, path: str, body: Any, limit: Deadline) -> Reply:
        headers = {"authorization": f"Bearer {self.token}"}
        return await self.transport.call(backend.control, "POST", path, body, deadline=limit, headers=headers)

    async def _parsed(self, message: type[M], reply: Reply) -> M:
        try:
            return await self.offload.run(lambda: message.model_validate(jsoncodec.loads(reply.body)))
        except (ValueError, ValidationError) as error:
            raise ServerError(f"what came is no {message.__name__}: {str(error)[:200]}") from error

    def _note(self, what: str, count: int, why: str) -> None:
        self.counts[what] += count
        logger.warning("%s: %d: %s", what, count, why[:500])


def _check_status(path: str, reply: Reply) -> None:
    if reply.status != 200:
        raise ServerError(f"{path} answered HTTP {reply.status}")


def claim_problem(claim: PrefixClaim | None, prefix: CutPrefix, candidate: Candidate, weights: str) -> str | None:
    """Why a staged prefix is not what its acknowledgement says, or None. `weights`: which made the tokens, it says."""
    if claim is None:
        return "it is not staged any more"
    source = (claim.source.rollout_id, claim.source.attempt, claim.source.model_call_id)
    said = {
        "staging_keys": (claim.staging_keys, prefix.staging_keys),
        "source": (source, (prefix.rollout_id, prefix.attempt, prefix.model_call_id)),
        "request_digest": (claim.request_digest, candidate.facts.request_digest),
        "policy_version": (claim.policy_version, weights),
        "prefix_token_count": (claim.prefix_token_count, prefix.prefix_token_count),
        "prefix_digest": (claim.prefix_digest, prefix.prefix_digest),
        "effective_output_limit": (claim.effective_output_limit, prefix.effective_output_limit),
        "finish_reason": (claim.finish_reason, prefix.terminal_finish_reason),
        "number of tokens": (len(claim.token_ids), claim.prefix_token_count),
        "number of log_probs": (len(claim.log_probs), claim.prefix_token_count),
    }
    for name, (got, wanted) in said.items():
        if got != wanted:
            return f"its {name} is another than acknowledged"
    if prefix_digest(claim.token_ids, claim.log_probs) != claim.prefix_digest:
        return "its tokens do not have the digest acknowledged"
    return None


def read_cut(value: Any, tokens: Mapping[str, Any] | None) -> Cut:
    """A cut out of a record, with its tokens from beside the records; raises `ValueError`."""
    if not isinstance(value, dict) or not isinstance(value.get("claim"), dict) or tokens is None:
        raise ValueError("a generation cut without a claim or without its tokens")
    cut = Cut.model_validate({**value, "claim": {**value["claim"], **tokens}})
    if prefix_digest(cut.claim.token_ids, cut.claim.log_probs) != cut.prefix.prefix_digest:
        raise ValueError("the tokens of the generation cut do not have its digest")
    return cut
