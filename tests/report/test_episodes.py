"""Episodes and conversations of checkpoint directories, ours and those of Gym's own participants, from real files."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from gymckpt.errors import DamagedState, UsageError
from gymckpt.identity import EpisodeId, Kind
from gymckpt.ports import ThreadOffload
from gymckpt.report.conversation import lines_of, read_conversation
from gymckpt.report.documents import EpisodeView
from gymckpt.report.episodes import list_episodes
from gymckpt.storage.checkpoints import Collection, Restarted
from gymckpt.storage.files import LocalFileSystem
from gymckpt.storage.records import Boundary, ExportedRecord
from gymckpt.storage.writer import ParticipantWriter

FS = LocalFileSystem()
ONE, TWO = EpisodeId("aaaaaaaa-2-0"), EpisodeId("aaaaaaaa-10-0", 3)
SAID = [
    {"role": "user", "content": "How much is it?"},
    {"type": "function_call", "name": "price", "arguments": '{"of": "tea"}', "call_id": "1"},
    {"type": "function_call_output", "call_id": "1", "output": "3.20"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is 3.20."}]},
]


async def _write(checkpoint: Path, kind: Kind, instance: str, *records: ExportedRecord) -> None:
    directory = checkpoint / "gym" / kind / instance
    directory.mkdir(parents=True)
    writer = ParticipantWriter(
        FS, ThreadOffload(), directory, checkpoint_id=checkpoint.name, kind=kind, instance=instance
    )
    for record in records:
        await writer.add(record)
    await writer.finish()


def _record(episode: EpisodeId, point: Boundary | None, turns: int, **fields: Any) -> ExportedRecord:
    reference = {"rollout_id": episode.rollout_id, "attempt": episode.attempt}
    return ExportedRecord(episode, {"episode_id": reference, **fields}, boundary=point, turns=turns)


def _agent_state(*, inputs: int) -> dict[str, Any]:
    return {"step": "loop", "state": {"conversation": {"1": {"input": SAID[:inputs], "outputs": SAID[inputs:]}}}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "ckpt-000001-00000000"

    async def write() -> None:
        at_agent = Boundary("invoke_agent", 1, 100.0)
        await _write(path, "environment", "env", _record(ONE, at_agent, 0), _record(TWO, None, 0))
        loop = Boundary("loop", 12, 160.0)
        await _write(path, "agent", "agent", _record(ONE, loop, 5, boundary=_agent_state(inputs=1)))
        await _write(path, "resources", "shop", _record(ONE, None, 0, state={"tea": 3.2}))

    asyncio.run(write())
    return path


def _listed(checkpoint: Path, cut: Collection | None = None) -> list[EpisodeView]:
    return asyncio.run(list_episodes(FS, ThreadOffload(), checkpoint, cut))


def _cut(continued: list[EpisodeId], restarted: dict[EpisodeId, str]) -> Collection:
    reasons = [Restarted(episode, reason) for episode, reason in restarted.items()]
    return Collection("ckpt-000001-00000000", "a" * 32, 1, 1, 100.0, continued=continued, restarted=reasons)


def test_an_episode_is_merged_from_all_its_participants(checkpoint: Path) -> None:
    one, two = _listed(checkpoint, _cut([ONE], {TWO: "no_boundary"}))
    assert (one.rollout_id, one.attempt, one.turns, one.restart) == (ONE.rollout_id, 0, 5, None)
    assert one.kinds == ["environment", "agent", "resources"]
    assert one.bytes > 0
    assert (two.rollout_id, two.attempt, two.boundary, two.restart) == (TWO.rollout_id, 3, None, "no_boundary")


def test_the_boundary_is_the_owners_step_with_the_latest_number(checkpoint: Path) -> None:
    boundary = _listed(checkpoint)[0].boundary
    assert str(boundary) == "invoke_agent/12"
    assert boundary is not None
    assert boundary.at == 160.0


def test_episodes_stand_in_the_order_of_their_tasks(checkpoint: Path) -> None:
    assert [episode.rollout_id for episode in _listed(checkpoint)] == [ONE.rollout_id, TWO.rollout_id]


def test_an_episode_that_no_participant_holds_is_listed_with_its_reason(checkpoint: Path) -> None:
    gone = EpisodeId("aaaaaaaa-7-0")
    (listed,) = _listed(checkpoint, _cut([], {gone: "cannot_capture:shell"}))
    assert (listed.rollout_id, listed.restart, listed.kinds) == (gone.rollout_id, "cannot_capture:shell", [])


def test_an_episode_that_had_ended_at_the_cut_is_not_listed(checkpoint: Path) -> None:
    assert [episode.rollout_id for episode in _listed(checkpoint, _cut([ONE], {}))] == [ONE.rollout_id]


def test_the_conversation_goes_up_to_the_boundary(checkpoint: Path) -> None:
    items = asyncio.run(read_conversation(FS, ThreadOffload(), checkpoint, ONE))
    assert items == SAID
    assert [(line.who, line.text) for line in lines_of(items)] == [
        ("user", "How much is it?"),
        ("call", 'price({"of": "tea"})'),
        ("result", "3.20"),
        ("assistant", "It is 3.20."),
    ]


def test_an_unknown_episode_is_the_users_error(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="holds nothing of episode aaaaaaaa-2-0-a7"):
        asyncio.run(read_conversation(FS, ThreadOffload(), checkpoint, EpisodeId(ONE.rollout_id, 7)))


def test_directories_of_gyms_own_participants_are_read(tmp_path: Path) -> None:
    directory = tmp_path / "step_7" / "gym" / "agent" / "simple_agent"
    directory.mkdir(parents=True)
    record = {"episode_id": {"rollout_id": "0-0", "attempt": 0}, "boundary": _agent_state(inputs=1)}
    data = json.dumps(record).encode() + b"\n"
    digest = hashlib.sha256(data).hexdigest()
    (directory / f"records-{digest}.jsonl").write_bytes(data)
    manifest = {
        "schema_version": 1,
        "kind": "agent",
        "instance": "simple_agent",
        "checkpoint_id": "step_7",
        "records_file": f"records-{digest}.jsonl",
        "records_sha256": digest,
        "record_count": 1,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    (episode,) = _listed(tmp_path / "step_7")
    assert (episode.rollout_id, episode.kinds) == ("0-0", ["agent"])
    assert str(episode.boundary) == "loop/0"
    items = asyncio.run(read_conversation(FS, ThreadOffload(), tmp_path / "step_7", EpisodeId("0-0")))
    assert items == SAID


def test_a_damaged_index_is_named(checkpoint: Path) -> None:
    directory = checkpoint / "gym" / "agent" / "agent"
    index = directory / json.loads((directory / "manifest.json").read_text())["index"]["file"]
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 1
    index.chmod(0o600)
    index.write_bytes(data)
    with pytest.raises(DamagedState, match=index.name):
        _listed(checkpoint)
