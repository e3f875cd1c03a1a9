"""What a participant tells about itself: status, reports, events."""

from pathlib import Path

import pytest

from gymckpt.identity import EpisodeId
from tests.participant.roles import busy
from tests.participant.stand import A, B, Stand, X, refused, started, virtually


def test_the_status_says_what_a_controller_must_know(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        stand.role.start(B, restart=True)
        await stand.retire(X, EpisodeId("gone", 3))
        status = await stand.participant.status()
        assert (status.kind, status.instance, status.phase) == ("environment", "counter", "idle")
        assert (status.checkpoint_id, status.lease_expires_at) == (None, None)
        assert status.retired_rollouts == 1
        assert status.restored_pending == 0
        assert status.boot_id == "boot"
        assert status.report.restarts == ["b"]
        assert {"restore_later_attempt", "probe", "needs_by_episode"} <= set(status.extensions)
        assert status.counters == {"retired": 1}

    virtually(rule)


def test_a_report_names_at_most_100_blockers_and_every_restart(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        for number in range(300):
            stand.role.start(EpisodeId(f"r{number:03}"), restart=True)
            stand.role.gate._add(f"e{number:03}", 1)
        reply = await stand.prepare(X, seconds=1)
        assert reply.report.blocker_count == 300
        assert reply.report.blockers == [f"e{number:03}" for number in range(100)]
        assert len(reply.report.restarts) == 300

    virtually(rule)


def test_restarts_do_not_block_and_their_set_is_frozen_by_prepare(tmp_path: Path) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        await started(stand, A)
        stand.role.start(B, restart=True)
        async with busy(stand.role, B, 1000.0):
            reply = await stand.prepare(X)
            assert (reply.phase, reply.report.restarts) == ("prepared", ["b"])
            stand.role.end(B)
            assert (await stand.participant.status()).report.restarts == ["b"]

    virtually(rule)


def test_an_event_is_one_line_of_json_with_names_and_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def rule() -> None:
        stand = Stand(tmp_path)
        with caplog.at_level("INFO", "gymckpt.participant"):
            await stand.checkpoint(X)
            await refused("stale_checkpoint", stand.prepare(X))

    virtually(rule)
    events = [record.__dict__["event"] for record in caplog.records]
    assert [event["event"] for event in events] == ["prepared", "committed", "resumed", "refused.stale_checkpoint"]
    assert all(event["instance"] == "counter" for event in events)
    assert all("\n" not in record.getMessage() and record.getMessage().startswith("{") for record in caplog.records)
