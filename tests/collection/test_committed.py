"""What Gym's own participants need, read from their records."""

import hashlib
import json
from pathlib import Path
from typing import Any

from gymckpt.collection.committed import needs_of_record, read_committed
from gymckpt.coordination import Deployment, ParticipantName, ParticipantRef
from gymckpt.identity import EpisodeId, Kind
from gymckpt.ports import ServerRef
from gymckpt.storage.files import LocalFileSystem
from gymckpt.wire.control import CommitReply
from tests.simulation.clock import InlineOffload, run_virtual

R1, R2 = EpisodeId("r1"), EpisodeId("r2", 1)
AGENT: ParticipantName = ("agent", "agent")
TOOLS: ParticipantName = ("resources", "tools")
OTHER: ParticipantName = ("resources", "other")
HOLDERS = {("environment", "env"): frozenset({R1}), AGENT: frozenset({R1}), OTHER: frozenset({R1}), TOOLS: frozenset()}


def needs(step: str, *, episode: EpisodeId = R1) -> Any:
    holders: dict[ParticipantName, frozenset[EpisodeId]] = dict(HOLDERS)
    return needs_of_record("environment", {"boundary": {"step": step}}, episode, holders)


def test_a_gym_record_needs_whoever_holds_the_episode_of_the_kinds_its_remaining_steps_call() -> None:
    assert needs("invoke_agent") == (AGENT, OTHER)
    assert needs("verify") == (OTHER,)
    assert needs("return_result") == ()


def test_a_kind_that_none_holds_is_still_needed() -> None:
    assert needs("invoke_agent", episode=R2) == (AGENT, OTHER)


def test_a_gym_record_without_a_boundary_starts_over() -> None:
    assert needs_of_record("environment", {"boundary": None}, R1, {}) is None
    assert needs_of_record("agent", {"boundary": {"step": "loop"}}, R1, {}) == ()


def test_gyms_directories_are_read_where_the_reply_says_nothing_of_needs(tmp_path: Path) -> None:
    lines = [
        {"episode_id": {"rollout_id": "r1", "attempt": 0}, "task_digest": "", "boundary": {"step": "verify"}},
        {"episode_id": {"rollout_id": "r2", "attempt": 1}, "task_digest": "", "boundary": None},
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    digest = hashlib.sha256(data).hexdigest()
    part = tmp_path / "gym" / "environment" / "env"
    part.mkdir(parents=True)
    (part / f"records-{digest}.jsonl").write_bytes(data)
    manifest = {
        "schema_version": 1,
        "kind": "environment",
        "instance": "env",
        "checkpoint_id": "ckpt-1",
        "records_file": f"records-{digest}.jsonl",
        "records_sha256": digest,
        "record_count": 2,
    }
    (part / "manifest.json").write_text(json.dumps(manifest))

    def ref(kind: Kind, instance: str) -> ParticipantRef:
        return ParticipantRef(ServerRef(instance, f"http://{instance}"), kind, instance)

    deployment = Deployment((ref("environment", "env"), ref("resources", "tools")))
    replies = {
        ("environment", "env"): CommitReply(phase="committed", manifest=manifest, episode_ids=["r1", "r2-a1"]),
        ("resources", "tools"): CommitReply(phase="committed", manifest={}, episode_ids=["r1"]),
    }

    async def main() -> None:
        committed = await read_committed(
            deployment,
            {p.name: replies[p.name] for p in deployment.participants},
            tmp_path,
            LocalFileSystem(),
            InlineOffload(),
        )
        assert committed[("environment", "env")].needs == {R1: (TOOLS,), R2: None}
        assert committed[TOOLS].episodes == {R1}

    run_virtual(main())
