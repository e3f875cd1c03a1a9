"""What a row of the ledger says about one model call, and which earlier call it follows.

A row is plain JSON, so that what another implementation adds to it survives a restore. The fields we write:
`call_id`, `index` (position in the rollout), `capture_key` (under which it was made), `lineage` and `parent`,
`response_id`, `request_digest`, `output_digest`, `item_ids` and `item_digests` (of what the model said),
`prompt_tokens`, `output_tokens`, `staging_key` and `staging_chain`, `policy_version`, `admitted_at`, and `repeats`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gymckpt.wire.responses import (
    Route,
    content_digest,
    digest,
    is_model_made,
    item_ids,
    output_items,
    usage,
)

Row: TypeAlias = dict[str, Any]
LineageKind = Literal["root", "resolved", "unresolved"]


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which earlier call of the rollout a call follows: none (root), exactly one, or nobody can say (unresolved)."""

    kind: LineageKind
    parent: str | None = None


ROOT = Lineage("root")
UNRESOLVED = Lineage("unresolved")


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What is known of a call when it is admitted."""

    call_id: str
    index: int
    capture_key: str
    lineage: Lineage
    request_digest: str
    admitted_at: float
    repeats: str | None = None
    """The restored call in whose place this one stands, because its answer never reached the restored agent."""


def make_row(
    facts: CallFacts, route: Route, reply: Mapping[str, Any], *, policy_version: str, chain: Sequence[str]
) -> Row:
    """The row of a call that got `reply`. `chain` = staging keys of the prefixes that the answer continues."""
    said = output_items(route, reply)
    counts = usage(reply)
    row = {
        "call_id": facts.call_id,
        "index": facts.index,
        "capture_key": facts.capture_key,
        "lineage": facts.lineage.kind,
        "parent": facts.lineage.parent,
        "response_id": reply.get("id"),
        "request_digest": facts.request_digest,
        "output_digest": digest(said),
        "item_ids": item_ids(said),
        "item_digests": [content_digest(item) for item in said if is_model_made(item)],
        "prompt_tokens": counts.prompt_tokens,
        "output_tokens": counts.output_tokens,
        "staging_key": f"{facts.capture_key}/{facts.call_id}",
        "staging_chain": list(chain),
        "policy_version": policy_version,
        "admitted_at": facts.admitted_at,
    }
    return row if facts.repeats is None else {**row, "repeats": facts.repeats}


def resolve(
    rows: Sequence[Row], conversation: Sequence[Mapping[str, Any]], previous_response_id: Any = None
) -> Lineage:
    """Which of `rows` made the last thing the model says in `conversation`. By id where ids survived, else by content;
    two that fit equally well are ambiguous, and ambiguous is unresolved."""
    if isinstance(previous_response_id, str):
        return _only([row for row in rows if row.get("response_id") == previous_response_id])
    last = next((item for item in reversed(conversation) if is_model_made(item)), None)
    ids = set(item_ids([last])) if last is not None else set()
    if last is None or (not rows and not ids):
        # An assistant message without an id, before any call was made, is part of the task.
        return ROOT
    if by_id := [row for row in rows if ids.intersection(row.get("item_ids") or ())]:
        return _only(by_id)
    said = content_digest(last)
    return _only([row for row in rows if said in (row.get("item_digests") or ())])


def repeated(rows: Sequence[Row], capture_key: str, request_digest: str) -> Row | None:
    """The restored row that a call with `request_digest` makes again: made under another capture key, followed by
    nothing, repeated by nothing."""
    done = {row.get("parent") for row in rows} | {row.get("repeats") for row in rows}
    for row in rows:
        same = row.get("request_digest") == request_digest and row.get("capture_key") != capture_key
        if same and row["call_id"] not in done and isinstance(row.get("index"), int):
            return row
    return None


def next_index(rows: Sequence[Row]) -> int:
    """The index of the rollout's next call."""
    return max((row["index"] for row in rows if isinstance(row.get("index"), int)), default=-1) + 1


def row_problem(row: Any) -> str | None:
    """Why `row` cannot be a row of the ledger, or None."""
    if not isinstance(row, dict):
        return f"a row is a JSON {type(row).__name__}"
    call_id = row.get("call_id")
    if not isinstance(call_id, str) or not 0 < len(call_id) <= 256:
        return "a row has no call_id"
    return None


def _only(fitting: Sequence[Row]) -> Lineage:
    if len(fitting) == 1:
        return Lineage("resolved", fitting[0]["call_id"])
    return UNRESOLVED
