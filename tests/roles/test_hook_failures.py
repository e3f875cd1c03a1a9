"""Whatever an author's hook raises or gives fails that checkpoint or restore by session and episode, on one line."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gymckpt.jsoncodec import Json
from gymckpt.ports import Reply
from tests.roles.tally import A, B, Tally, X, Y, seeded
from tests.servers.resources_desk import Desk, on, value
from tests.simulation.clock import run_virtual

Act = Callable[[], Any]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raising(error: BaseException) -> Act:
    def act() -> Any:
        raise error

    return act


def giving(value: Any) -> Act:
    return lambda: value


def a_cycle() -> Any:
    state: list[Any] = []
    state.append(state)
    return state


RAISED = {
    "SystemExit: 3": raising(SystemExit(3)),
    "GeneratorExit: ": raising(GeneratorExit()),
    "KeyboardInterrupt: ": raising(KeyboardInterrupt()),
    "Unspeakable: (its text raises RuntimeError)": raising(Unspeakable()),
    "ValueError: one two": raising(ValueError("one\n\r\ntwo")),
}
GIVEN = {
    "a key that is not a string, int": giving({1: 2}),
    "a key that is not a string, bool": giving({True: "x"}),
    "a key that is not a string, NoneType": giving({None: None}),
    "not a JSON value: set at /x": giving({"x": set()}),
    "not a JSON value: bytes at /": giving(b"x"),
    "nested more than 1000 levels": a_cycle,
    "an integer of more than 1000000 digits": giving({"n": 1 << 3_400_000}),
}
BATCHES = {
    "the hook gave list": giving([]),
    "the hook gave NoneType": giving(None),
    "the hook answered for 1": giving({1: 2, "x": 3}),
    "SystemExit: 3": raising(SystemExit(3)),
}


class Odd(Tally):
    """The hook named by `hook` does what `act` does, where it is for a session whose total is 2."""

    hook = ""
    act: Act

    async def export_session_state(self, session_id: str) -> Json:
        if self.hook == "export" and self.totals[session_id] == 2:
            return self.act()
        return await super().export_session_state(session_id)

    async def validate_session_state(self, session_id: str, state: Json) -> None:
        if self.hook == "validate" and state["total"] == 2:
            self.act()

    async def restore_session_state(self, session_id: str, state: Json) -> None:
        if self.hook == "restore" and state["total"] == 2:
            self.act()
        await super().restore_session_state(session_id, state)


class Sync(Odd):
    """A hook that is no coroutine function, and raises before there is anything to await."""

    def validate_session_state(self, session_id: str, state: Json) -> Coroutine[Any, Any, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if state["total"] == 2:
            self.act()
        return asyncio.sleep(0)


class Batch(Odd):
    async def export_session_states(self, session_ids: Sequence[str]) -> Mapping[str, Json]:
        return self.act()  # type: ignore[no-any-return]


async def two_sessions(desk: Desk, server: Tally) -> str:
    """Seed episodes `a` and `b`; the session of `b`, whose total is 2."""
    await seeded(desk, A, total=1)
    await seeded(desk, B, total=2)
    return next(session_id for session_id, total in server.totals.items() if total == 2)


def check(reply: Reply, status: int, *parts: str) -> None:
    said = value(reply)["error"]["detail"]
    assert reply.status == status, said
    assert "\n" not in said
    assert [part for part in parts if part not in said] == [], said


@pytest.mark.parametrize("said", [*RAISED, *GIVEN])
def test_an_export_fails_by_name_and_the_next_checkpoint_is_whole(tmp_path: Path, said: str) -> None:
    async def main() -> None:
        server = Odd()
        desk = Desk(server, on(tmp_path))
        session_id = await two_sessions(desk, server)
        server.hook, server.act = "export", {**RAISED, **GIVEN}[said]
        await desk.done("prepare", X)
        failed = await desk.control("commit", X, checkpoint_dir=str(tmp_path / X), episode_ids=None)
        check(failed, 409, f"session {session_id}", "episode b", said)
        await desk.done("resume", X)
        server.hook = ""
        assert (await desk.checkpoint(Y, tmp_path / Y))["episode_ids"] == ["a", "b"]

    run_virtual(main())


@pytest.mark.parametrize("said", BATCHES)
def test_a_batch_fails_by_the_names_of_its_sessions(tmp_path: Path, said: str) -> None:
    async def main() -> None:
        server = Batch()
        desk = Desk(server, on(tmp_path))
        session_id = await two_sessions(desk, server)
        server.act = BATCHES[said]
        await desk.done("prepare", X)
        failed = await desk.control("commit", X, checkpoint_dir=str(tmp_path / X), episode_ids=None)
        check(failed, 409, f"session {session_id} of episode b", said)

    run_virtual(main())


@pytest.mark.parametrize("said", RAISED)
@pytest.mark.parametrize(
    ("kind", "hook", "status"), [(Odd, "validate", 422), (Sync, "validate", 422), (Odd, "restore", 409)]
)
def test_a_restore_fails_by_name_and_installs_nothing(
    tmp_path: Path, kind: type[Odd], hook: str, status: int, said: str
) -> None:
    async def main() -> None:
        server = Tally()
        desk = Desk(server, on(tmp_path))
        session_id = await two_sessions(desk, server)
        await desk.checkpoint(X, tmp_path / X)
        odd = kind()
        odd.hook, odd.act = hook, RAISED[said]
        desk.boot(odd)
        named = [{"rollout_id": rollout_id, "attempt": 0} for rollout_id in ("a", "b")]
        failed = await desk.control("restore", Y, checkpoint_dir=str(tmp_path / X), episode_ids=named)
        check(failed, status, f"session {session_id}", "episode b", said)
        assert odd.totals == {}

    run_virtual(main())
