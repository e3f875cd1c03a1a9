"""What a person changes in a run that nobody is carrying out: retry failures, omit rollouts, judge answers again.

Each takes the lock and an epoch of its own, and writes an explicit `reopened` before an outcome loses its force.
"""

from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from gymckpt.collection import events
from gymckpt.collection.events import Outcome
from gymckpt.collection.feed import find
from gymckpt.collection.journals import Journals
from gymckpt.collection.lock import RunLock
from gymckpt.collection.opening import Ports, known_positions, new_run
from gymckpt.collection.planfile import PlanReader
from gymckpt.collection.replies import Succeeded, judge_flat
from gymckpt.collection.resultfiles import ResultFiles
from gymckpt.collection.rows import result_row
from gymckpt.collection.run import NONE, Run
from gymckpt.collection.rundirectory import RunPaths, RunRecord, read_run
from gymckpt.errors import DamagedState, ServerError, UsageError
from gymckpt.identity import EpisodeId
from gymckpt.ports import Deadline, ServerRef
from gymckpt.storage.outcomes import Outcome as StoredOutcome
from gymckpt.wire.client import json_object

VERIFY_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Revised:
    """What was changed, by rollout id."""

    rollouts: tuple[str, ...]
    passed_over: Mapping[str, str]
    """Why the others were left as they are."""


@dataclass(frozen=True, slots=True)
class _Revision:
    record: RunRecord
    run: Run
    journals: Journals
    paths: RunPaths
    ports: Ports
    final: Mapping[str, tuple[Outcome, StoredOutcome]]
    """The outcome that counts, of every rollout asked for."""

    async def reopen(self, rollout_id: str, reason: str) -> int:
        """Take the outcome's force away, if there is one; gives the opening that the next outcome belongs to."""
        opening = self.run.opening(rollout_id)
        if self.run.outcome(rollout_id) == NONE:
            return opening
        attempt = self.final[rollout_id][0].episode.attempt
        await self.journals.append(events.Reopened(rollout_id, opening + 1, attempt, reason))
        return opening + 1

    async def rewrite_results(self) -> None:
        """Write the result files anew: rows that lost their force go."""
        await self.journals.append(events.RowsWritten(0, 0, 0))
        files = ResultFiles(self.ports.fs, self.ports.offload, self.paths)
        await files.open(events.RowsWritten(0, 0, 0), self.journals, self.run.opening)
        if (written := await files.flush(durable=True)) is not None:
            await self.journals.append(written)
        await files.close()


async def retry(
    ports: Ports,
    root: PurePath,
    *,
    kinds: Collection[str] | None = None,
    rollouts: Collection[str] = (),
    steal_lock: bool = False,
) -> Revised:
    """Reopen failed rollouts, so that a restore tries them again with a fresh count of attempts: those whose failure is
    of one of `kinds` (None: of any), and every one named in `rollouts`, whatever its outcome."""
    async with _revising(ports, root, set(rollouts), steal_lock, every_failure=not rollouts or kinds is not None) as to:
        wanted = [
            rollout_id
            for rollout_id, (outcome, _) in to.final.items()
            if rollout_id in rollouts or (outcome.outcome == "failed" and (kinds is None or outcome.kind in kinds))
        ]
        succeeded = False
        for rollout_id in wanted:
            succeeded = succeeded or to.final[rollout_id][0].outcome == "succeeded"
            await to.reopen(rollout_id, "retry")
        if succeeded:
            await to.rewrite_results()
        return Revised(tuple(wanted), {name: "it has no outcome yet" for name in rollouts if name not in to.final})


async def omit(ports: Ports, root: PurePath, rollouts: Collection[str], *, steal_lock: bool = False) -> Revised:
    """Take rollouts out of the count for good: neither succeeded nor failed, and never sent again."""
    async with _revising(ports, root, set(rollouts), steal_lock) as to:
        changed = []
        for rollout_id in dict.fromkeys(rollouts):
            known = to.final.get(rollout_id)
            if known is not None and known[0].outcome == "omitted":
                continue
            opening = await to.reopen(rollout_id, "omitted")
            attempt = known[0].episode.attempt if known else max(0, to.run.last_attempt(rollout_id))
            await to.journals.append(Outcome(EpisodeId(rollout_id, attempt), "omitted", opening=opening))
            changed.append(rollout_id)
        if any(to.final[name][0].outcome == "succeeded" for name in changed if name in to.final):
            await to.rewrite_results()
        left = [name for name in rollouts if name not in changed]
        return Revised(tuple(changed), dict.fromkeys(left, "it is omitted already"))


async def verify_again(
    ports: Ports,
    root: PurePath,
    server: ServerRef,
    rollouts: Collection[str] = (),
    *,
    steal_lock: bool = False,
) -> Revised:
    """Keep the answers and judge them again on the resources server `server`, whose verification must be replayable:
    every succeeded rollout, or those named. The new judgement takes the old one's place once it is durable."""
    named = set(rollouts)
    async with _revising(ports, root, named, steal_lock, every_success=not named) as to:
        plan = await ports.offload.run(lambda: PlanReader(ports.fs, to.paths.plan, to.record.plan))
        changed: list[str] = []
        passed_over: dict[str, str] = {}
        answered = {name: known for name, known in to.final.items() if known[0].outcome == "succeeded"}
        places = {to.run.place(name): name for name in answered}
        async for planned in find(plan, set(places), ports.offload):
            rollout_id = places[planned.task, planned.repeat]
            outcome, stored = answered[rollout_id]
            content = planned.content()
            old = await to.journals.row(stored)
            try:
                row = await _judged_again(ports, server, content["row"], old or {})
            except ServerError as error:
                passed_over[rollout_id] = error.detail
                continue
            opening = await to.reopen(rollout_id, "verified again")
            new = replace(
                outcome,
                reward=row.reward,
                opening=opening,
                row=result_row(row.result, content["row"], outcome.episode, planned.task, planned.repeat),
            )
            await to.journals.append(new)
            changed.append(rollout_id)
        if changed:
            await to.rewrite_results()
        return Revised(tuple(changed), passed_over)


async def _judged_again(ports: Ports, server: ServerRef, row: Mapping[str, Any], old: Mapping[str, Any]) -> Succeeded:
    if "response" not in old:
        raise ServerError("its result holds no response to judge")
    data = row["task_input"].get("task_data", {}) if "task_input" in row else row
    asked = row.get("task_input", row)
    body = {
        **data,
        "responses_create_params": old.get("responses_create_params", asked["responses_create_params"]),
        "response": old["response"],
    }
    limit = Deadline.after(ports.clock, VERIFY_TIMEOUT_S)
    reply = await ports.data.call(server, "POST", "/verify", body, deadline=limit)
    verdict = judge_flat(json_object(reply, f"verify on {server.instance}"))
    if not isinstance(verdict, Succeeded):
        raise ServerError(f"verify on {server.instance} gave no reward")
    return verdict


@asynccontextmanager
async def _revising(
    ports: Ports,
    root: PurePath,
    rollouts: set[str],
    steal_lock: bool,
    *,
    every_failure: bool = False,
    every_success: bool = False,
) -> AsyncIterator[_Revision]:
    paths = RunPaths(root)
    record = await ports.offload.run(lambda: read_run(ports.fs, paths))
    run = new_run(record)
    for rollout_id in rollouts:
        _check_known(run, rollout_id)
    lock = RunLock(ports.fs, ports.offload, ports.clock, paths, holder=ports.holder, lives=ports.lives)
    await lock.take(steal=steal_lock)
    try:
        journals = Journals(ports.fs, ports.offload, ports.clock, paths.journal, epoch=lock.epoch)
        await journals.open(await known_positions(ports, paths, record.run_id))
        journals.on_durable = lambda event, number: run.apply(event)
        try:
            await journals.append(events.EpochBegun(lock.epoch, str(lock.holder)))
            await ports.offload.run(lambda: journals.replay_into(run))
            wanted = rollouts, every_failure, every_success
            final = await ports.offload.run(lambda: _final(run, journals.outcomes(), *wanted))
            yield _Revision(record, run, journals, paths, ports, final)
        finally:
            await journals.close()
    finally:
        await lock.release()


def _check_known(run: Run, rollout_id: str) -> None:
    try:
        run.place(rollout_id)
    except DamagedState as error:
        raise UsageError(error.detail, hint="rollout ids are in rollouts.jsonl, as _ng_rollout_id") from error


def _final(
    run: Run,
    outcomes: Iterable[tuple[Outcome, StoredOutcome]],
    rollouts: set[str],
    failures: bool,
    successes: bool,
) -> dict[str, tuple[Outcome, StoredOutcome]]:
    """The outcome that counts of each rollout asked for: the first final one of its newest opening."""
    final: dict[str, tuple[Outcome, StoredOutcome]] = {}
    for outcome, stored in outcomes:
        rollout_id = outcome.episode.rollout_id
        kind = outcome.outcome
        asked = rollout_id in rollouts or (failures and kind == "failed") or (successes and kind == "succeeded")
        if asked and outcome.final and outcome.opening == run.opening(rollout_id):
            final.setdefault(rollout_id, (outcome, stored))
    return final
