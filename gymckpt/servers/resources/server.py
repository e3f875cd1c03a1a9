"""What the author of an environment writes: tools, a verifier, and what a checkpoint may hold of a session."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar

from gymckpt.errors import GymckptError
from gymckpt.identity import EpisodeId
from gymckpt.jsoncodec import Json
from gymckpt.roles.hook_errors import said
from gymckpt.roles.overdue_hooks import HookOverdue, OverdueHooks
from gymckpt.roles.resources_hooks import SessionStateError
from gymckpt.servers.resources.tool_schema import ToolDescription, describe
from gymckpt.wire.control import ResourcesMode, VerifyMode

Tool: TypeAlias = Callable[..., Awaitable[Json]]
"""`async def tool(call, **arguments)`; the JSON it returns is what the model sees."""

F = TypeVar("F", bound=Callable[..., Any])
_TOOL_MARK = "_gymckpt_tool"


class SessionLost(GymckptError):
    """Raised by `export_session_state`: this session's state is gone. Its episode is then started over."""

    code = "session_lost"


@dataclass(frozen=True, slots=True)
class Seed:
    """What a session starts from."""

    session_id: str
    episode: EpisodeId | None
    task_data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """Whose tool call this is."""

    session_id: str
    episode: EpisodeId | None
    """The attempt that owns the session now: it grows with each restore."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What is to be verified. `session_id` is None where a caller of a stateless server has no session."""

    session_id: str | None
    body: dict[str, Any]
    """The task's data, `responses_create_params` and `response`."""
    episode: EpisodeId | None = None
    """The attempt that asks, where it is known."""

    @property
    def response(self) -> dict[str, Any]:
        """The model's last response; empty if there is none."""
        response = self.body.get("response")
        return response if isinstance(response, dict) else {}


def tool(function: F) -> F:
    """Mark a method `async def name(self, call: Call, *, ...)` as the tool `POST /name`."""
    setattr(function, _TOOL_MARK, True)
    return function


class ResourcesServer:
    """Subclass, state the two modes, write `verify`, and tools where there are any; `app.resources_app` serves it.

    `checkpoint_mode` says what the code can do, so it is an attribute of the class and no setting. Fail closed: a
    server that says nothing is `restart_only`.
    """

    checkpoint_mode: ClassVar[ResourcesMode] = "restart_only"
    checkpoint_verify: ClassVar[VerifyMode] = "wait"
    compares_cohorts: ClassVar[bool] = False
    """`verify` waits for an answer's siblings and gives their verdicts together; needs `checkpoint_verify` replay."""
    checkpoint_hook_s: ClassVar[float] = 60.0
    """How long a hook may take for one session."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.overdue_hooks = OverdueHooks(instance)

    # What a server does

    async def startup(self) -> None:
        """Called once before the first request."""

    async def shutdown(self) -> None:
        """Called once after the last."""

    async def seed_session(self, seed: Seed) -> None:
        """Make the session `seed.session_id`."""

    async def verify(self, verification: Verification) -> dict[str, Any]:
        """The fields of the verdict, `reward` among them."""
        raise NotImplementedError

    def tools(self) -> Mapping[str, Tool]:
        """Tools by name: the methods marked with `@tool`."""
        members = inspect.getmembers(type(self), lambda member: getattr(member, _TOOL_MARK, False))
        return {name: getattr(self, name) for name, _ in members}

    def describe_tool(self, name: str, tool: Tool) -> ToolDescription:
        """How a tool is listed where agents ask for a list (MCP): by default from its docstring and signature."""
        return describe(tool)

    # What a checkpoint needs of a session: for `exported` servers, one at a time or in batches

    async def export_session_state(self, session_id: str) -> Json:
        """The session's state as JSON; raises `SessionLost`."""
        raise NotImplementedError

    async def validate_session_state(self, session_id: str, state: Json) -> None:
        """Raise `ValueError` if `state` cannot be restored; change nothing."""

    async def restore_session_state(self, session_id: str, state: Json) -> None:
        """Install a session that `export_session_state` gave, here or in another process."""
        raise NotImplementedError

    async def retire_session_state(self, session_id: str) -> None:
        """Free the session. Safe to repeat, and for a session that never was. Called at every session's end."""

    async def suspend_session_states(self, session_ids: Sequence[str]) -> None:
        """Stop paying for external compute; override together with `wake_session_states`."""

    async def wake_session_states(self, session_ids: Sequence[str]) -> None:
        """Undo a suspend."""

    async def export_session_states(self, session_ids: Sequence[str]) -> Mapping[str, Json]:
        """The states of a batch, side by side; override where a batch is cheaper."""
        lost = object()

        async def exported(session_id: str) -> Any:
            try:
                return await self.export_session_state(session_id)
            except SessionLost:
                return lost

        states = await self._side_by_side("exporting", {id_: partial(exported, id_) for id_ in session_ids})
        return {session_id: state for session_id, state in states.items() if state is not lost}

    async def validate_session_states(self, states: Mapping[str, Json]) -> None:
        """Check a batch, side by side."""
        work = {id_: partial(self.validate_session_state, id_, state) for id_, state in states.items()}
        await self._side_by_side("validating", work)

    async def restore_session_states(self, states: Mapping[str, Json]) -> None:
        """Install a batch, side by side; override where a batch is cheaper."""
        work = {id_: partial(self.restore_session_state, id_, state) for id_, state in states.items()}
        await self._side_by_side("restoring", work, changing=True)

    def can_suspend(self) -> bool:
        """Whether both directions are overridden."""
        mine, base = type(self), ResourcesServer
        return (
            mine.suspend_session_states is not base.suspend_session_states
            and mine.wake_session_states is not base.wake_session_states
        )

    async def _side_by_side(
        self, doing: str, work: Mapping[str, Callable[[], Awaitable[Any]]], *, changing: bool = False
    ) -> dict[str, Any]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    session_id: group.create_task(self._named(session_id, doing, one, changing))
                    for session_id, one in work.items()
                }
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__
        return {session_id: task.result() for session_id, task in tasks.items()}

    async def _named(self, session_id: str, doing: str, work: Callable[[], Awaitable[Any]], changing: bool) -> Any:
        async def undo() -> None:
            await self.retire_session_state(session_id)

        try:
            return await self.overdue_hooks.limited(
                work,
                f"{doing} session {session_id}",
                self.checkpoint_hook_s,
                session_id=session_id,
                changes=[session_id] if changing else (),
                undo=undo if changing else None,
            )
        except HookOverdue as error:
            what = f"session {session_id}: a hook took longer than {self.checkpoint_hook_s:g} s"
            raise SessionStateError(what, session_id=session_id) from error
        except Exception as error:  # an author's code may raise anything; it fails by the session's name
            what = f"session {session_id}: {said(error)}"
            raise SessionStateError(what, session_id=session_id) from error
