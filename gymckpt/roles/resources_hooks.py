"""How session states leave an environment author's code and come back: in batches, in time, failing by name."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from gymckpt import jsoncodec
from gymckpt.errors import CheckpointFailed, GymckptError, InvalidCheckpointState
from gymckpt.identity import EpisodeId
from gymckpt.jsoncodec import Json
from gymckpt.roles.hook_errors import said
from gymckpt.roles.overdue_hooks import GRACE_S, HookOverdue, OverdueHooks
from gymckpt.roles.resources_sessions import Session

log = logging.getLogger(__name__)
T = TypeVar("T")

_NAMED_IN_A_FAILURE = 5


class SessionStateError(GymckptError):
    """A hook failed for the sessions that it names; `session_id` where it is one."""

    code = "session_state"

    def __init__(self, detail: str, *, session_id: str | None = None) -> None:
        super().__init__(detail)
        self.session_id = session_id


class SessionHooks(Protocol):
    """What a resources server does for its sessions' states. Each hook works on its batch side by side."""

    overdue_hooks: OverdueHooks
    """Which of them were left to themselves."""

    async def export_session_states(self, session_ids: Sequence[str]) -> Mapping[str, Json]:
        """The states by session id. A session whose state is lost is left out: its episode is then started over."""
        ...

    async def validate_session_states(self, states: Mapping[str, Json]) -> None:
        """Raise `SessionStateError` (or `ValueError`) if one of them cannot be restored; change nothing."""
        ...

    async def restore_session_states(self, states: Mapping[str, Json]) -> None:
        """Install all of them."""
        ...

    async def retire_session_state(self, session_id: str) -> None:
        """Free everything of this session. Safe to repeat, and for a session that never was."""
        ...

    def can_suspend(self) -> bool:
        """Whether suspend and wake are both there."""
        ...

    async def suspend_session_states(self, session_ids: Sequence[str]) -> None:
        """Stop paying for external compute of these sessions."""
        ...

    async def wake_session_states(self, session_ids: Sequence[str]) -> None:
        """Undo a suspend."""
        ...


@dataclass(frozen=True, slots=True)
class HookLimits:
    """How much goes to one hook call, and how long it may take."""

    batch_bytes: int = 8 << 20
    """States of about this size go to one hook call together."""
    first_batch: int = 32
    """Sessions in a batch while no size is known."""
    hook_s: float = 60.0
    """A hook that takes longer has failed."""


async def export_states(
    hooks: SessionHooks, sessions: Sequence[Session], limits: HookLimits
) -> AsyncIterator[tuple[Session, Json]]:
    """The states of `sessions`, batch by batch, so that no more than about one batch is held in memory.

    A lost session is left out with a warning. Raises `CheckpointFailed` naming the sessions when a hook fails, takes
    too long, answers for sessions that it was not asked for, or gives what is no JSON.
    """
    position, known, known_bytes = 0, 0, 0
    while position < len(sessions):
        mean = known_bytes // known if known else None
        batch = _next_batch(sessions, position, limits, mean)
        position += len(batch)
        what = f"exporting the state of {_names(batch)}"
        states = await limited(hooks, partial(_export, hooks, batch, what), what, limits.hook_s)
        for session in batch:
            if session.session_id not in states:
                log.warning("the state of %s is lost: its episode will be started over", session)
                continue
            state = states[session.session_id]
            session.state_bytes = max(1, _checked_size(session, state))
            known, known_bytes = known + 1, known_bytes + session.state_bytes
            yield session, state


async def _export(hooks: SessionHooks, batch: Sequence[Session], what: str) -> dict[str, Json]:
    asked = {session.session_id: session.episode for session in batch}
    states = await _naming(asked, hooks.export_session_states(list(asked)))
    if not isinstance(states, Mapping):
        raise CheckpointFailed(f"{what}: the hook gave {type(states).__name__}, not a mapping of session ids to states")
    if unasked := [session_id for session_id in states if session_id not in asked]:
        raise CheckpointFailed(f"{what}: the hook answered for {unasked[0]!r}, which was not asked for")
    return dict(states)


def _checked_size(session: Session, state: Json) -> int:
    try:
        return size_of(state)
    except Exception as error:  # an author's hook may give anything
        raise CheckpointFailed(f"{session}: its state cannot be written as JSON: {said(error)}") from error


async def restore_states(
    hooks: SessionHooks, states: Mapping[str, Json], episodes: Mapping[str, EpisodeId], limits: HookLimits
) -> None:
    """Install all states, batch by batch; on failure all of them are retired again before it is raised by name.

    `episodes`: whose states they are, by session id.
    """
    try:
        for batch in state_batches(states, limits.batch_bytes):
            what = f"restoring the state of {_ids(batch, episodes)}"
            undo = partial(_retire_each, hooks, list(batch))
            restoring = partial(_naming_later, hooks.restore_session_states, batch, episodes)
            await limited(hooks, restoring, what, limits.hook_s, changes=batch, undo=undo)
    except BaseException:
        await _free_all(hooks, list(states), limits.hook_s)
        raise


async def free_state(hooks: SessionHooks, session_id: str, limit_s: float) -> None:
    """Free one session; raises `CheckpointFailed` naming it if that fails or takes longer than `limit_s`.

    Never two at once for one session: a hook that was left to itself is waited for first.
    """
    what = f"freeing session {session_id}"
    if session_id in hooks.overdue_hooks.changing():
        raise CheckpointFailed(f"{what}: an earlier hook of it has not ended", hint="start the server again")
    await limited(hooks, partial(hooks.retire_session_state, session_id), what, limit_s, changes=[session_id])


async def _retire_each(hooks: SessionHooks, session_ids: Sequence[str]) -> None:
    for session_id in session_ids:
        await hooks.retire_session_state(session_id)


async def _free_all(hooks: SessionHooks, session_ids: Sequence[str], limit_s: float) -> None:
    """Best effort: what cannot be freed is said."""

    async def free(session_id: str) -> None:
        try:
            await free_state(hooks, session_id, limit_s)
        except CheckpointFailed as error:
            log.warning("after a failed restore: %s", error.detail)

    await asyncio.gather(*(free(session_id) for session_id in session_ids))


async def validate_states(
    hooks: SessionHooks, states: Mapping[str, Json], episodes: Mapping[str, EpisodeId], limits: HookLimits
) -> None:
    """Raise `InvalidCheckpointState` naming sessions and `episodes` if one of `states` cannot be restored."""
    for batch in state_batches(states, limits.batch_bytes):
        what = f"the state of {_ids(batch, episodes)} cannot be restored"
        try:
            await limited(
                hooks, partial(_naming_later, hooks.validate_session_states, batch, episodes), what, limits.hook_s
            )
        except CheckpointFailed as error:
            raise InvalidCheckpointState(error.detail) from error


def state_batches(states: Mapping[str, Json], batch_bytes: int) -> Iterator[dict[str, Json]]:
    """`states` in order, in batches of about `batch_bytes` of JSON."""
    batch: dict[str, Json] = {}
    filled = 0
    for session_id, state in states.items():
        size = size_of(state)
        if batch and filled + size > batch_bytes:
            yield batch
            batch, filled = {}, 0
        batch[session_id] = state
        filled += size
    if batch:
        yield batch


def size_of(state: Json) -> int:
    """About the bytes of `state` as JSON: exact enough to bound a batch, and cheap for the usual large text."""
    match state:
        case str():
            return len(state) + 2
        case dict() if len(state) <= 16 and all(isinstance(k, str) and _is_short(v) for k, v in state.items()):
            return sum(len(key) + (len(value) if isinstance(value, str) else 8) + 6 for key, value in state.items())
    return len(jsoncodec.dumps(state))


def _is_short(value: Any) -> bool:
    return isinstance(value, str | None) or (isinstance(value, int) and value.bit_length() <= 64)


def _next_batch(sessions: Sequence[Session], start: int, limits: HookLimits, mean: int | None) -> list[Session]:
    batch: list[Session] = []
    filled = 0
    for index in range(start, len(sessions)):
        session = sessions[index]
        expected = session.state_bytes or mean or limits.batch_bytes // limits.first_batch
        if batch and filled + expected > limits.batch_bytes:
            break
        batch.append(session)
        filled += expected
    return batch


async def _naming(episodes: Mapping[str, EpisodeId | None], work: Awaitable[T]) -> T:
    """`work`, whose failure also names the episode: an author's code knows sessions alone."""
    try:
        return await work
    except SessionStateError as error:
        if error.session_id is None or error.session_id not in episodes:
            raise
        raise SessionStateError(f"{error.detail} (episode {episodes[error.session_id]})") from error


async def _naming_later(
    hook: Callable[[Mapping[str, Json]], Awaitable[None]],
    batch: Mapping[str, Json],
    episodes: Mapping[str, EpisodeId],
) -> None:
    await _naming(episodes, hook(batch))


async def limited(
    hooks: SessionHooks,
    work: Callable[[], Awaitable[T]],
    what: str,
    limit_s: float,
    *,
    changes: Collection[str] = (),
    undo: Callable[[], Awaitable[None]] | None = None,
) -> T:
    """`work` within `limit_s`, as `OverdueHooks.limited` does it; raises `CheckpointFailed` however it fails."""
    overdue = hooks.overdue_hooks
    try:
        # Twice the grace: the hooks of single sessions inside it have theirs first.
        return await overdue.limited(work, what, limit_s, grace_s=2 * GRACE_S, changes=changes, undo=undo)
    except HookOverdue as error:
        raise CheckpointFailed(f"{what} took longer than {limit_s:g} s") from error
    except GymckptError as error:
        raise CheckpointFailed(error.detail, hint=error.hint) from error
    except Exception as error:  # whatever an author's hook raises fails this checkpoint, by name, and nothing else
        raise CheckpointFailed(f"{what}: {said(error)}") from error


def _names(sessions: Sequence[Session]) -> str:
    return _listed([str(session) for session in sessions])


def _ids(session_ids: Iterable[str], episodes: Mapping[str, EpisodeId]) -> str:
    return _names([Session(session_id, episodes.get(session_id)) for session_id in session_ids])


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_IN_A_FAILURE
    return ", ".join(names[:_NAMED_IN_A_FAILURE]) + (f" and {more} more" if more > 0 else "")
