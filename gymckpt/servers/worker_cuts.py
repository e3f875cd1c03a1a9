"""Generation cuts on an inference worker: freeze every named answer at once, stage what there is, say so."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from gymckpt.errors import CheckpointConflict, GymckptError
from gymckpt.identity import EpisodeId
from gymckpt.ports import Offload
from gymckpt.roles.staging import PrefixRefused, Replacement, StagingStore, refusal
from gymckpt.servers.worker_engine import Engine
from gymckpt.servers.worker_generation import Generation, Generations
from gymckpt.servers.worker_tokens import Token
from gymckpt.wire.cuts import CutPrefix, CutReceipt, CutRequest, PrefixClaim, PrefixSource, Ticket, prefix_digest
from gymckpt.wire.responses import digest

REMEMBERED_CUTS = 16


@dataclass(frozen=True, slots=True)
class _Frozen:
    """An answer as it stood at one moment."""

    ticket: Ticket
    generation: Generation
    tokens: Sequence[Token]


class WorkerCuts:
    """See the module. The same request again gets the same receipt: one client's retry makes no second cut."""

    def __init__(self, engine: Engine, generations: Generations, store: StagingStore, offload: Offload) -> None:
        self._engine = engine
        self._generations = generations
        self._store = store
        self._offload = offload
        self._cuts: OrderedDict[str, tuple[str, asyncio.Task[CutReceipt]]] = OrderedDict()

    async def cut(self, request: CutRequest) -> CutReceipt:
        """The receipt for an inventory; raises `CheckpointConflict` for another one under the same checkpoint."""
        name = f"{request.server_name}/{request.checkpoint_id}"
        known = self._cuts.get(name)
        if known is not None and known[0] != request.inventory_digest:
            raise CheckpointConflict(f"checkpoint {request.checkpoint_id} was cut with another inventory")
        if known is None or _failed(known[1]):
            known = request.inventory_digest, asyncio.ensure_future(self._carry_out(request))
            self._cuts[name] = known
            while len(self._cuts) > REMEMBERED_CUTS:
                self._cuts.popitem(last=False)
        return await asyncio.shield(known[1])

    async def staged(self, staging_keys: Sequence[str]) -> list[PrefixClaim | None]:
        """What is staged under each key."""
        return [await self._store.get(key) for key in staging_keys]

    async def continued(self, claim: PrefixClaim, episode: EpisodeId, generation: Generation) -> None:
        """Let `generation` go on from the prefix; raises `PrefixRefused`."""
        limit = generation.turn.output_limit
        replacement = Replacement(
            episode.rollout_id,
            episode.attempt,
            generation.request_digest,
            await self._offload.run(lambda: digest(list(generation.turn.prompt_token_ids))),
            self._engine.policy_version,
            limit,
        )
        staged = await self._store.get(claim.staging_keys[-1])
        problem = await self._offload.run(lambda: refusal(claim, staged, replacement))
        if problem is not None:
            raise problem
        tokens = [Token(*pair) for pair in zip(claim.token_ids, claim.log_probs, strict=True)]
        try:
            generation.turn.check_prefix(tokens)
        except ValueError as error:
            raise PrefixRefused("engine", str(error)) from error
        generation.tokens = tokens
        generation.continued = len(tokens)
        generation.lineage = (*claim.lineage, *claim.staging_keys)
        generation.finish_reason = claim.finish_reason

    async def _carry_out(self, request: CutRequest) -> CutReceipt:
        cut_id = secrets.token_hex(8)
        # All at one moment, before anything is awaited.
        found = [self._freeze(ticket) for ticket in request.active_prefixes]
        frozen = [one for one in found if isinstance(one, _Frozen)]
        claims = await self._offload.run(lambda: [self._claim(cut_id, n, one) for n, one in enumerate(frozen)])
        failed: str | None = None
        try:
            if claims:
                await self._store.stage(cut_id, claims)
        except GymckptError as error:
            failed = error.detail[:300]
        by_ticket = {one.ticket.ticket_id: claim for one, claim in zip(frozen, claims, strict=True)}
        prefixes = [
            _failure(one[0], one[1])
            if not isinstance(one, _Frozen)
            else _failure(one.ticket, failed)
            if failed
            else _durable(one.ticket, by_ticket[one.ticket.ticket_id])
            for one in found
        ]
        return CutReceipt(
            checkpoint_id=request.checkpoint_id,
            cut_id=cut_id,
            inventory_digest=request.inventory_digest,
            inventory=request.active_prefixes,
            backend_snapshot_id=self._engine.policy_version,
            prefixes=prefixes,
        )

    def _freeze(self, ticket: Ticket) -> _Frozen | tuple[Ticket, str]:
        generation = self._generations.find(ticket.model_call_id)
        if generation is None:
            return ticket, "no such call is known here"
        if generation.capture_key != ticket.episode.capture_key:
            return ticket, "the call belongs to another episode"
        if not generation.tokens:
            return ticket, "nothing was generated yet"
        return _Frozen(ticket, generation, tuple(generation.tokens))

    def _claim(self, cut_id: str, number: int, frozen: _Frozen) -> PrefixClaim:
        generation, ticket = frozen.generation, frozen.ticket
        token_ids = [token.id for token in frozen.tokens]
        log_probs = [token.logprob for token in frozen.tokens]
        ended = generation.finish_reason if len(frozen.tokens) == len(generation.tokens) else None
        return PrefixClaim(
            staging_keys=[f"{cut_id}.{number}"],
            source=PrefixSource(
                rollout_id=ticket.rollout_id, attempt=ticket.attempt, model_call_id=ticket.model_call_id
            ),
            request_digest=generation.request_digest,
            prompt_digest=digest(list(generation.turn.prompt_token_ids)),
            prefix_digest=prefix_digest(token_ids, log_probs),
            prefix_token_count=len(token_ids),
            lineage=list(generation.lineage),
            policy_version=self._engine.policy_version,
            effective_output_limit=generation.turn.output_limit,
            finish_reason=ended,
            token_ids=token_ids,
            log_probs=log_probs,
        )


def _failed(task: "asyncio.Task[CutReceipt]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _failure(ticket: Ticket, why: str) -> CutPrefix:
    return CutPrefix(**ticket.model_dump(), disposition="durable_failure", failure=why)


def _durable(ticket: Ticket, claim: PrefixClaim) -> CutPrefix:
    return CutPrefix(
        **ticket.model_dump(),
        disposition="durable_prefix",
        cut_kind="active_prefix" if claim.finish_reason is None else "terminal_completion",
        frozen_buffer_id=f"buffer-{claim.staging_keys[-1]}",
        staging_keys=claim.staging_keys,
        prefix_token_count=claim.prefix_token_count,
        prefix_digest=claim.prefix_digest,
        effective_output_limit=claim.effective_output_limit,
        terminal_stop_reason="end_of_turn" if claim.finish_reason == "stop" else claim.finish_reason,
        terminal_finish_reason=claim.finish_reason,
    )
