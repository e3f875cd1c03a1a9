"""The audit log."""

import asyncio
from pathlib import Path

import pytest

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.ports import SystemClock, ThreadOffload
from gymckpt.roles.audit import AuditLog


def test_writers_that_share_a_file_never_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"

    async def main() -> None:
        logs = [AuditLog(path, f"server-{number}", SystemClock(), ThreadOffload()) for number in range(4)]
        episode = EpisodeId("r", 2)
        await asyncio.gather(*(log.record(episode, call, tool="t" * call) for call in range(100) for log in logs))
        for log in logs:
            log.close()

    asyncio.run(main())
    lines = [jsoncodec.loads(line) for line in path.read_bytes().splitlines()]
    assert sorted((line["server"], line["call"]) for line in lines) == [
        (f"server-{number}", call) for number in range(4) for call in range(100)
    ]
    assert {(line["rollout_id"], line["attempt"]) for line in lines} == {("r", 2)}


def test_a_line_that_cannot_be_written_stops_the_call(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "missing" / "audit.jsonl", "server", SystemClock(), ThreadOffload())
    with pytest.raises(FileNotFoundError):
        asyncio.run(log.record(None, 1))
