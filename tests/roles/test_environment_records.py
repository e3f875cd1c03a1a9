"""Records: what is checked before anything is installed, and what incremental commits rely on."""

import asyncio
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gymckpt import jsoncodec
from gymckpt.errors import InvalidCheckpointState
from gymckpt.identity import EpisodeId
from gymckpt.roles import agent_record, environment_record
from gymckpt.storage.records import StoredRecord
from tests.roles.town import Town, finished
from tests.simulation.clock import run_virtual

R = EpisodeId("r")


async def _records(town: Town, server: str) -> list[Any]:
    return [record async for record in town.roles[server].export(None)]


def _stored(town: Town) -> dict[str, dict[str, Any]]:
    async def main() -> dict[str, dict[str, Any]]:
        town.hold.at(("model", 2))
        town.run()
        await town.hold.reached[("model", 2)].wait()
        found = {}
        for server in ("environment", "agent"):
            (record,) = await _records(town, server)
            found[server] = jsoncodec.loads(jsoncodec.dumps(record.record))
        return found

    return run_virtual(main())


DAMAGE: list[tuple[str, list[str], Any]] = [
    ("environment", ["task_digest"], "short"),
    ("environment", ["boundary", "step"], "elsewhere"),
    ("environment", ["boundary", "step"], "verify"),
    ("environment", ["boundary", "number"], -1),
    ("environment", ["boundary", "state", "resources_cookies"], {"a": 1}),
    ("environment", ["boundary", "state", "resources"], "unknown"),
    ("environment", ["episode_id", "rollout_id"], "other"),
    ("agent", ["session_key"], None),
    ("agent", ["session"], None),
    ("agent", ["boundary"], None),
    ("agent", ["boundary", "step"], "verify"),
    ("agent", ["boundary", "state", "conversation"], {}),
    ("agent", ["boundary", "state", "activation"], -1),
    ("agent", ["boundary", "state", "pending_tools"], "all"),
    ("agent", ["session", "tools", "server"], "unknown"),
]


@pytest.mark.parametrize(("server", "path", "value"), DAMAGE)
def test_a_damaged_record_is_refused_by_name_and_nothing_is_installed(
    tmp_path: Path, server: str, path: list[str], value: Any
) -> None:
    town = Town(tmp_path)
    record = copy.deepcopy(_stored(town)[server])
    inner = record
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value

    async def stored() -> AsyncIterator[StoredRecord]:
        yield StoredRecord(R, record)

    async def main() -> None:
        fresh = Town(tmp_path)
        with pytest.raises(InvalidCheckpointState, match=r"\br\b"):
            await fresh.roles[server].validate(stored())
        assert fresh.roles[server].live() == []

    run_virtual(main())


def test_lists_only_grow_and_their_pointers_find_them(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        seen: dict[str, list[Any]] = {}
        running = town.run()
        for place in range(4):
            town.hold.at(("model", place))
            await town.hold.reached[("model", place)].wait()
            (record,) = await _records(town, "agent")
            assert record.lists, "the conversation is pinned"
            for pointer, length in record.lists.items():
                items: Any = record.record
                for part in pointer.split("/")[1:]:
                    items = items[part]
                before = seen.get(pointer, [])
                assert items[: len(before)] == before
                assert len(items) >= length >= len(before)
                seen[pointer] = items[:length]
            town.hold.let_go(("model", place))
        assert (await finished(running))["result"]["reward"] == 1.0
        assert max(len(items) for items in seen.values()) == 6

    run_virtual(main())


def test_a_boundary_is_the_same_however_late_it_is_exported(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        town.hold.at(("model", 1))
        running = town.run()
        await town.hold.reached[("model", 1)].wait()
        (session,) = list(town.roles["agent"].sessions)
        point = session.track.exported
        early = jsoncodec.dumps(_cut(point.as_json()))
        town.hold.let_go(("model", 1))
        await finished(running)
        await asyncio.sleep(1)
        assert jsoncodec.dumps(_cut(point.as_json())) == early

    run_virtual(main())


def _cut(snapshot: Any) -> Any:
    """What storage writes: pinned lists no further than their length."""
    state = copy.deepcopy(snapshot.state)
    for pointer, length in snapshot.lists.items():
        *way, last = pointer.split("/")[1:]
        inner = state
        for part in way:
            inner = inner[part]
        inner[last] = inner[last][:length]
    return state


def test_the_same_record_comes_back_out_after_a_restore(tmp_path: Path) -> None:
    town = Town(tmp_path)
    stored = _stored(town)
    servers = town.servers
    for server, module in (("environment", environment_record), ("agent", agent_record)):
        source = StoredRecord(R, copy.deepcopy(stored[server]))
        if module is environment_record:
            restored = environment_record.read(source, servers)
            again = environment_record.export(R, restored.task_digest, restored.point)
        else:
            session = agent_record.read(source)
            assert isinstance(session, agent_record.RestoredSession)
            again = agent_record.export(R, session.point, None, key=session.key)
        assert jsoncodec.dumps(again.record) == jsoncodec.dumps(stored[server])
