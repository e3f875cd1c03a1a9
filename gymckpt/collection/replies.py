"""What the answer to `POST /run` means: a result, a failure of the rollout, or a request that was never begun. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import (
    CONTROL_ERRORS,
    NOT_STARTED_CODES,
    BackendUnavailable,
    DeadlinePassed,
    NotSent,
    ServerError,
    StaleAttempt,
)
from gymckpt.identity import EpisodeId
from gymckpt.ports import Reply
from gymckpt.wire.client import retry_after_s
from gymckpt.wire.gym import RunReply

CONNECTION = "connection"
"""Kind of a failure: the connection broke, and nobody knows whether the request was received."""
OUTAGES = frozenset({BackendUnavailable.code, NotSent.code}) | NOT_STARTED_CODES
"""Kinds of failures that no rollout has caused: inference, or another server, was not there, or was closed."""
MAX_REASON = 2000
MAX_KIND = 200
BUSY_S = 1.0
"""How long a server that said 429 without a Retry-After is left alone."""


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The verifier judged: the reply to keep, and its reward."""

    result: Mapping[str, Any]
    reward: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt brought no judgement. `terminal`: trying again is of no use, says the server."""

    kind: str
    reason: str
    stage: str | None = None
    terminal: bool = False
    unknown: bool = False
    """Nobody knows whether the request was received: it may still run."""


@dataclass(frozen=True, slots=True)
class NotStarted:
    """No work was begun: the same attempt is sent again, not before `after_s`. `unreachable`: the connection was
    refused. `closed`: refused because of a checkpoint."""

    after_s: float = 0.0
    unreachable: bool = False
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Superseded:
    """The server refuses this attempt for ever, because it was retired: no failure of the rollout."""

    reason: str


_GYM_FAILED = "Hit an exception in "
_INNER_CODE = re.compile(r'\\*"error\\*": *{\\*"code\\*": *\\*"([a-z_]+)\\*"')
"""What a Gym server answers (HTTP 500, a text) when a server that it called has failed: it repeats that server's reply,
escaped once for each server on the way."""
INNER_CHARACTERS = 1 << 16

Verdict: TypeAlias = Succeeded | Failed | NotStarted | Superseded


def judge(reply: Reply, episode: EpisodeId, now: float) -> Verdict:
    """What a reply to `/run` means. `now` is unix time, for a Retry-After that names a date."""
    if reply.status in (429, 503) and (reply.status == 429 or "retry-after" in reply.headers):
        asked_s = retry_after_s(reply, now)
        return NotStarted(after_s=BUSY_S if asked_s is None else asked_s)
    try:
        body = jsoncodec.loads(reply.body)
    except ValueError as error:
        if 200 <= reply.status < 300:
            return Failed("bad_reply", f"HTTP {reply.status} without JSON: {error}")
        body = reply.body[:MAX_REASON].decode("utf-8", "replace")
    if 200 <= reply.status < 300:
        return _judge_body(body, episode)
    code = _error_code(body) or _inner_code(body)
    if reply.status == 409 and code in NOT_STARTED_CODES:
        return NotStarted(closed=True)
    if code == StaleAttempt.code:
        return Superseded(_text(body))
    # A request that the server cannot read will not become readable by sending it again.
    terminal = reply.status in (400, 404, 405, 413, 422)
    return Failed(code or f"http_{reply.status}", _text(body), terminal=terminal)


def judge_error(error: ServerError) -> Verdict:
    """What it means that there was no reply."""
    match error:
        case NotSent():
            return NotStarted(unreachable=True)
        case DeadlinePassed():
            return Failed("timeout", error.detail[:MAX_REASON], unknown=True)
        case _:
            return Failed(CONNECTION, error.detail[:MAX_REASON], unknown=True)


def _judge_body(body: Any, episode: EpisodeId) -> Verdict:
    if not isinstance(body, dict):
        return Failed("bad_reply", f"the reply is a JSON {type(body).__name__}, not an object")
    if "episode_id" not in body or not ("result" in body or "failure" in body):
        return judge_flat(body)
    try:
        typed = RunReply.model_validate(body)
    except ValidationError as error:
        return Failed("bad_reply", f"the typed reply cannot be read: {error.error_count()} wrong fields")
    if typed.episode_id.episode != episode:
        return Failed("bad_reply", f"the reply is for {typed.episode_id.episode}, not for {episode}")
    if typed.failure is not None:
        failure = typed.failure
        kind, reason = _said(failure.failure_kind or "failed", MAX_KIND), _said(failure.failure_reason, MAX_REASON)
        if kind == StaleAttempt.code:
            return Superseded(reason)
        return Failed(kind, reason, failure.stage, failure.terminal)
    return judge_flat(typed.result or {})


def judge_flat(body: Mapping[str, Any]) -> Verdict:
    """What a verifier's own reply means."""
    # A failure of the machinery is never a reward of 0, whatever number came with it.
    if kind := body.get("failure_kind"):
        return Failed(_said(kind, MAX_KIND), _said(body.get("failure_reason") or "", MAX_REASON))
    reward = _finite(body.get("reward"))
    if reward is None:
        shown = _said(body.get("reward"), 80)
        return Failed("no_reward", f"the reply's reward is {shown}, not a finite number", "verification")
    return Succeeded(body, reward)


def _finite(reward: object) -> float | None:
    """The reward as a float; None for what is none, or for an integer beyond all floats."""
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return None
    try:
        return float(reward) if math.isfinite(reward) else None
    except OverflowError:
        return None


def _said(value: Any, limit: int) -> str:
    """The beginning of what a server said; what in it is no character is replaced."""
    if not isinstance(value, str):
        try:
            value = jsoncodec.dumps(value).decode()
        except jsoncodec.NotJson as error:
            value = str(error)
    return str(value[:limit].encode("utf-8", "replace").decode())


def _error_code(body: Any) -> str | None:
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return _said(code, MAX_KIND) if isinstance(code, str) else None


def _inner_code(body: Any) -> str | None:
    """The code of one of our own refusals in such a text."""
    if not isinstance(body, str) or not body.startswith(_GYM_FAILED):
        return None
    found = _INNER_CODE.search(body[:INNER_CHARACTERS])
    return found[1] if found is not None and found[1] in CONTROL_ERRORS else None


def _text(body: Any) -> str:
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        body = body["error"].get("detail", body["error"])
    return _said(body, MAX_REASON)
