"""What a user may do to outcomes: open failed rollouts again, or settle one by hand. Always an explicit event."""

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePath

from gymckpt.collection import run as states
from gymckpt.collection.events import Event, Outcome, Reopened
from gymckpt.collection.opening import Opened, Opener, Ports
from gymckpt.collection.settings import CollectSettings
from gymckpt.errors import DamagedState, NotAsAsked, UsageError
from gymckpt.identity import EpisodeId

UNKNOWN_KIND = "unknown"


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """A rollout whose outcome is `failed`."""

    rollout_id: str
    attempt: int
    """The last one used."""
    kind: str


@asynccontextmanager
async def held(root: PurePath, ports: Ports, *, steal_lock: bool = False) -> AsyncIterator[Opened]:
    """Hold the run in `root` for a change by hand; raises `NotAsAsked` while a collector holds it."""
    opener = Opener(CollectSettings(steal_lock=steal_lock), root, ports, lambda: False)
    await opener.holds_run(restore=True)
    try:
        opened = await opener.reopen(None)
        try:
            yield opened
        finally:
            await opened.journals.close()
    finally:
        await opener.lock.release()


def failed_rollouts(opened: Opened) -> list[FailedRollout]:
    """Every rollout whose outcome is `failed`, in the order of their outcomes. Blocking."""
    found: dict[str, FailedRollout] = {}
    for outcome, _ in opened.journals.outcomes():
        rollout_id = outcome.episode.rollout_id
        if outcome.final and outcome.outcome == "failed" and outcome.opening == opened.run.opening(rollout_id):
            failed = FailedRollout(rollout_id, outcome.episode.attempt, outcome.kind or UNKNOWN_KIND)
            found.setdefault(rollout_id, failed)
    return [failed for failed in found.values() if opened.run.outcome(failed.rollout_id) == states.FAILED]


def counts_by_kind(failed: Collection[FailedRollout]) -> Mapping[str, int]:
    """How many failed for which reason, most first."""
    return dict(Counter(rollout.kind for rollout in failed).most_common())


async def reopen(opened: Opened, rollouts: Collection[FailedRollout], reason: str) -> None:
    """Open these rollouts again: their next attempts are dispatched when the run goes on."""
    for failed in rollouts:
        opening = opened.run.opening(failed.rollout_id) + 1
        await _record(opened, Reopened(failed.rollout_id, opening, failed.attempt, reason))


async def omit(opened: Opened, rollout_id: str) -> None:
    """Settle a rollout as `omitted`: it is counted on its own and never dispatched again.

    Raises `NotAsAsked` for one that succeeded or is omitted already, `UsageError` for an id that is none of this run.
    """
    task, repeat = _place(opened, rollout_id)
    attempt = max(0, opened.run.last_attempt(rollout_id))
    match opened.run.outcome(rollout_id):
        case states.SUCCEEDED:
            raise NotAsAsked(f"{rollout_id} has succeeded: its result stays", hint="leave its row out where you use it")
        case states.OMITTED:
            raise NotAsAsked(f"{rollout_id} is omitted already")
        case states.FAILED:
            failed = {rollout.rollout_id: rollout for rollout in failed_rollouts(opened)}[rollout_id]
            attempt = failed.attempt
            await reopen(opened, [failed], "omitted by the user")
    assert not opened.run.finished(task, repeat)
    await _record(
        opened,
        Outcome(EpisodeId(rollout_id, attempt), "omitted", opening=opened.run.opening(rollout_id)),
    )


def _place(opened: Opened, rollout_id: str) -> tuple[int, int]:
    try:
        return opened.run.place(rollout_id)
    except DamagedState as error:
        raise UsageError(error.detail, hint="gymckpt inspect lists the rollouts in flight") from error


async def _record(opened: Opened, event: Event) -> None:
    await opened.journals.append(event)
    opened.run.apply(event)
