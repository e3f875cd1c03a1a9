"""Judging again: the answers of a run are kept, a verifier says anew what they are worth.

For a verifier that got better, or was wrong. Only one that needs nothing but the answer can do it: a verifier that
looks at a session would judge an empty one.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import SecretStr

from gymckpt import jsoncodec
from gymckpt.collection.events import Outcome, Reopened, RowsWritten
from gymckpt.collection.feed import find
from gymckpt.collection.opening import Opened, Ports
from gymckpt.collection.planfile import Planned
from gymckpt.collection.replies import Succeeded, judge_flat
from gymckpt.collection.resultfiles import ResultFiles
from gymckpt.collection.rows import result_row
from gymckpt.coordination import discover
from gymckpt.errors import NotAsAsked, ServerError, UsageError
from gymckpt.ports import Deadline, ServerRef
from gymckpt.storage.outcomes import Outcome as StoredOutcome
from gymckpt.wire.client import json_object

REVERIFY_PATH = "/reverify_mode"
REVERIFY_STATELESS = "stateless"
"""Where Gym's resources servers say whether an answer can be judged again, and how they say yes."""

VERIFY_TIMEOUT_S = 600.0
CONTROL_TIMEOUT_S = 30.0
AT_ONCE = 16
REASON = "judged again"


@dataclass(slots=True)
class Rejudged:
    """What came of it, by rollout id."""

    judged: list[str] = field(default_factory=list)
    """In the order of the plan."""
    changed: int = 0
    """How many of them got another reward."""
    kept: dict[str, str] = field(default_factory=dict)
    """Why the others keep the verdict that they had."""


@dataclass(frozen=True, slots=True)
class _Sample:
    outcome: Outcome
    stored: StoredOutcome
    next_opening: int
    """Above every opening that the journal knows of this rollout, so that a verdict whose reopening a crash prevented
    never counts."""


async def check_replayable(ports: Ports, verifier: ServerRef, token: SecretStr | None) -> None:
    """Raise `NotAsAsked` for a verifier that does not say that it needs the answer alone, `ServerError` for none."""
    limit = Deadline.after(ports.clock, CONTROL_TIMEOUT_S)
    told = await ports.data.call(verifier, "GET", REVERIFY_PATH, deadline=limit)
    if told.status == 200:
        try:
            replayable = jsoncodec.loads(told.body) == REVERIFY_STATELESS
        except ValueError:
            replayable = False
    else:
        found = (await discover([verifier], ports.control, token, limit)).participants
        replayable = any(participant.mode == "stateless" and participant.verify == "replay" for participant in found)
    if not replayable:
        raise NotAsAsked(
            f"{verifier.instance} does not say that it can judge an answer without its session",
            hint="a resources server says so with mode stateless and verify replay, or by GET /reverify_mode",
        )


async def judge_again(
    opened: Opened, ports: Ports, verifier: ServerRef, *, taskset: str | None, rollouts: Collection[str]
) -> Rejudged:
    """Judge the succeeded rollouts of `taskset` again (None: the run must have but one), or those named.

    Each new verdict counts from the moment it is durable; an answer that cannot be judged keeps the one that it had.
    Raises `UsageError` for names that are no succeeded rollouts.
    """
    samples = await ports.offload.run(lambda: _samples(opened))
    if unknown := sorted(set(rollouts) - samples.keys()):
        raise UsageError(f"{unknown[0][:160]} is no succeeded rollout of this run")
    places = {opened.run.place(name): name for name in (rollouts or samples)}
    if taskset is None and not rollouts:
        await _check_one_taskset(opened, ports, places)
    done = Rejudged()
    waiting: list[Planned] = []
    async for planned in find(opened.plan, set(places), ports.offload):
        if taskset is None or _taskset(planned.content()["row"]) == taskset:
            waiting.append(planned)
        if len(waiting) == AT_ONCE:
            await _judge_all(opened, ports, verifier, places, samples, waiting, done)
            waiting = []
    await _judge_all(opened, ports, verifier, places, samples, waiting, done)
    if done.judged:
        await _rewrite_results(opened, ports)
    return done


async def _judge_all(
    opened: Opened,
    ports: Ports,
    verifier: ServerRef,
    places: Mapping[tuple[int, int], str],
    samples: Mapping[str, _Sample],
    batch: list[Planned],
    done: Rejudged,
) -> None:
    names = [places[planned.task, planned.repeat] for planned in batch]
    rows = [await opened.journals.row(samples[name].stored) for name in names]
    asking = (_ask(ports, verifier, p.content()["row"], row or {}) for p, row in zip(batch, rows, strict=True))
    verdicts = await asyncio.gather(*asking)
    for name, planned, verdict in zip(names, batch, verdicts, strict=True):
        if isinstance(verdict, str):
            done.kept[name] = verdict
            continue
        sample = samples[name]
        episode = sample.outcome.episode
        row = result_row(verdict.result, planned.content()["row"], episode, planned.task, planned.repeat)
        outcome = replace(sample.outcome, reward=verdict.reward, opening=sample.next_opening, row=row)
        # The new verdict is durable before the old one loses its force: a crash between the two loses neither.
        await opened.lock.check()
        await opened.journals.append(outcome)
        reopened = Reopened(name, sample.next_opening, episode.attempt, REASON)
        await opened.journals.append(reopened)
        opened.run.apply(reopened)
        opened.run.apply(outcome)
        done.judged.append(name)
        done.changed += verdict.reward != sample.outcome.reward


async def _ask(ports: Ports, verifier: ServerRef, row: Mapping[str, Any], old: Mapping[str, Any]) -> Succeeded | str:
    """The new verdict, or why there is none."""
    if "response" not in old:
        return "its result holds no response to judge"
    asked = row.get("task_input", row)
    data = asked.get("task_data", {}) if "task_input" in row else row
    body = {
        **data,
        "responses_create_params": old.get("responses_create_params", asked["responses_create_params"]),
        "response": old["response"],
    }
    limit = Deadline.after(ports.clock, VERIFY_TIMEOUT_S)
    try:
        reply = await ports.data.call(verifier, "POST", "/verify", body, deadline=limit)
        verdict = judge_flat(json_object(reply, f"verify on {verifier.instance}"))
    except ServerError as error:
        return error.detail
    return verdict if isinstance(verdict, Succeeded) else f"verify on {verifier.instance} gave no reward"


def _samples(opened: Opened) -> dict[str, _Sample]:
    """The outcome that counts of every succeeded rollout. Blocking."""
    found: dict[str, _Sample] = {}
    openings: dict[str, int] = {}
    for outcome, stored in opened.journals.outcomes():
        name = outcome.episode.rollout_id
        openings[name] = max(openings.get(name, 0), outcome.opening)
        if outcome.final and outcome.outcome == "succeeded" and outcome.opening == opened.run.opening(name):
            found.setdefault(name, _Sample(outcome, stored, 0))
    return {name: replace(sample, next_opening=openings[name] + 1) for name, sample in found.items()}


async def _check_one_taskset(opened: Opened, ports: Ports, places: Collection[tuple[int, int]]) -> None:
    found: set[str | None] = set()
    async for planned in find(opened.plan, set(places), ports.offload):
        found.add(_taskset(planned.content()["row"]))
        if len(found) > 1:
            names = ", ".join(sorted(str(name) for name in found))
            raise UsageError(
                f"the run has more than one task set ({names}, ...) and one verifier was named",
                hint="give --taskset NAME",
            )


def _taskset(row: Mapping[str, Any]) -> str | None:
    return str(row["task_id"]["taskset"]) if "task_input" in row else None


async def _rewrite_results(opened: Opened, ports: Ports) -> None:
    """Write the result files anew: rows that lost their force go."""
    anew = RowsWritten(0, 0, 0)
    await opened.journals.append(anew)
    files = ResultFiles(ports.fs, ports.offload, opened.paths, opened.lock.check_now)
    await files.open(anew, opened.journals, opened.run.opening)
    try:
        if (written := await files.flush(durable=True)) is not None:
            await opened.journals.append(written)
    finally:
        await files.close()
