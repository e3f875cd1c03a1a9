"""Rules of generation cuts, from the policy model server down to a scripted worker whose pace the test sets."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from gymckpt.wire.cuts import CUT_PATH
from tests.servers.cutting import (
    FIRST,
    PACE,
    RESTORE,
    SECOND,
    answer_after_restore,
    cut_in_the_middle,
    run,
    scene,
    undisturbed,
)


@pytest.mark.parametrize("tokens_out", [2, 400])
def test_a_cut_call_is_continued_from_its_exact_tokens_and_none_is_generated_twice(
    tmp_path: Path, tokens_out: int
) -> None:
    async def work() -> None:
        whole = await undisturbed(tmp_path / "other", "Why?")
        async with scene(tmp_path) as play:
            reply = await cut_in_the_middle(play, "Why?", tokens_out)
            assert len(reply["staging_keys_by_episode"]["r-1"]) == 1
        async with scene(tmp_path) as play:
            await play.server.restore(FIRST, RESTORE, "r-1")
            assert (await play.server.status())["restored_generation_cuts"] == 1
            asking = play.server.asking("r-1-a1", "Why?")
            for _ in range(60):
                await play.clock.move(1.0)
            got = (await asking).json()
            assert got["token_ids"] == whole["token_ids"]
            assert got["log_probs"] == whole["log_probs"]
            stats = await play.stats()
            assert stats["generated_tokens"] == len(whole["token_ids"]) - tokens_out
            assert stats["continued_tokens"] == tokens_out
            status = await play.server.status()
            assert status["restored_generation_cuts"] == 0
            assert status["report"]["counts"]["cuts_used"] == 1

    run(work())


def test_an_answer_that_was_finished_and_held_is_not_generated_again_at_all(tmp_path: Path) -> None:
    async def work() -> None:
        whole = await undisturbed(tmp_path / "other", "Why?")
        async with scene(tmp_path) as play:
            asking = play.server.asking("r-1", "Why?")
            await play.clock.wait_for_sleepers(1)
            await play.server.control("prepare", FIRST)
            for _ in range(60):
                await play.clock.move(1.0)
            assert (await play.server.status())["report"]["counts"]["held"] == 1
            await play.server.checkpoint(FIRST, "r-1", resume=False)
            asking.cancel()
        async with scene(tmp_path) as play:
            got = (await answer_after_restore(play, "Why?")).json()
            assert got["token_ids"] == whole["token_ids"]
            assert (await play.stats())["generated_tokens"] == 0

    run(work())


def test_a_cut_serves_a_second_checkpoint_too_and_its_lineage_is_kept(tmp_path: Path) -> None:
    async def work() -> None:
        whole = await undisturbed(tmp_path / "other", "Why?")
        async with scene(tmp_path) as play:
            await cut_in_the_middle(play, "Why?", 100)
        async with scene(tmp_path) as play:
            await play.server.restore(FIRST, RESTORE, "r-1")
            await play.server.checkpoint("ckpt-000009-00000000", "r-1-a1")  # the call has not come again yet
            asking = play.server.asking("r-1-a1", "Why?")
            await play.clock.wait_for_sleepers(1)
            await play.clock.move(100 / PACE + 0.001)
            await play.server.checkpoint(SECOND, "r-1-a1", resume=False)
            asking.cancel()
        for checkpoint, tokens_out in (("ckpt-000009-00000000", 100), (SECOND, 200)):
            async with scene(tmp_path) as play:
                await play.server.restore(checkpoint, RESTORE, "r-1-a1")
                asking = play.server.asking("r-1-a2", "Why?")
                for _ in range(60):
                    await play.clock.move(1.0)
                assert (await asking).json()["token_ids"] == whole["token_ids"]
                assert (await play.stats())["generated_tokens"] == len(whole["token_ids"]) - tokens_out

    run(work())


def test_the_checkpoint_holds_the_tokens_so_a_worker_without_its_staging_continues_all_the_same(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with scene(tmp_path) as play:
            await cut_in_the_middle(play, "Why?", 100)
        for file in (tmp_path / "staging").glob("cut-*"):
            file.unlink()
        async with scene(tmp_path) as play:
            assert (await answer_after_restore(play, "Why?")).status_code == 200
            assert (await play.stats())["continued_tokens"] == 100

    run(work())


def test_the_tokens_of_a_cut_stand_in_a_file_of_their_own_and_nothing_is_restored_if_it_is_damaged(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with scene(tmp_path) as play:
            await cut_in_the_middle(play, "Why?", 100)
        part = tmp_path / "checkpoints" / FIRST / "gym" / "model" / "policy_model"
        (file,) = part.glob("prefixes-*.jsonl.zst")
        whole = file.read_bytes()
        file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        async with scene(tmp_path) as play:
            fields: dict[str, Any] = {
                "episode_ids": [{"rollout_id": "r-1"}],
                "checkpoint_dir": play.server.directory(FIRST),
            }
            refused = await play.server.try_control("restore", RESTORE, **fields)
            assert refused.json()["error"]["code"] == "invalid_checkpoint_state"
            assert "prefixes-" in refused.json()["error"]["detail"]

    run(work())


def test_another_request_than_the_one_that_was_cut_is_generated_whole(tmp_path: Path) -> None:
    async def work() -> None:
        async with scene(tmp_path) as play:
            await cut_in_the_middle(play, "Why?", 100)
        async with scene(tmp_path) as play:
            assert (await answer_after_restore(play, "Why not?")).status_code == 200
            assert (await play.stats())["continued_tokens"] == 0
            assert (await play.server.status())["restored_generation_cuts"] == 0

    run(work())


def test_a_changed_policy_version_is_refused_by_name_and_the_answer_generated_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with scene(tmp_path) as play:
            await cut_in_the_middle(play, "Why?", 100)
        async with scene(tmp_path, policy_version="v2") as play:
            got = await answer_after_restore(play, "Why?")
            assert got.status_code == 200
            stats = await play.stats()
            assert stats["continued_tokens"] == 0
            assert stats["generated_tokens"] == len(got.json()["token_ids"])
            assert (await play.server.status())["report"]["counts"]["cuts_refused"] == 1
        assert "policy_version" in caplog.text

    run(work())


@pytest.mark.parametrize(
    "constraint",
    [
        {"tool_choice": "required"},
        {"text": {"format": {"type": "json_schema", "schema": {}}}},
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "a+"},
    ],
)
def test_constrained_decoding_is_never_cut(tmp_path: Path, constraint: dict[str, Any]) -> None:
    async def work() -> None:
        async with scene(tmp_path) as play:
            asking = play.server.asking("r-1", {"input": "Why?", **constraint})
            await play.clock.wait_for_sleepers(1)
            await play.clock.move(1.0)
            reply = await play.server.checkpoint(FIRST, "r-1", resume=False)
            assert reply["staging_keys"] == []
            asking.cancel()

    run(work())


def test_a_retried_commit_and_a_retried_cut_make_one_cut(tmp_path: Path) -> None:
    async def work() -> None:
        async with scene(tmp_path) as play:
            await cut_in_the_middle(play, "Why?", 100)
            fields: dict[str, Any] = {
                "episode_ids": [{"rollout_id": "r-1"}],
                "checkpoint_dir": play.server.directory(FIRST),
            }
            again = await play.server.control("commit", FIRST, **fields)
            assert len(again["staging_keys"]) == 1
        assert len(list((tmp_path / "staging").glob("cut-*.jsonl"))) == 1

    run(work())


def test_a_worker_that_never_answers_a_cut_takes_at_most_half_of_the_time_left(tmp_path: Path) -> None:
    def stall(app: FastAPI) -> None:
        @app.middleware("http")
        async def stalled(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
            if request.url.path == CUT_PATH:
                await asyncio.Event().wait()
            return await call_next(request)

    async def work() -> None:
        async with scene(tmp_path, wrap=stall) as play:
            asking = play.server.asking("r-1", "Why?")
            await play.clock.wait_for_sleepers(1)
            await play.clock.move(1.0)
            await play.server.control("prepare", FIRST)
            fields: dict[str, Any] = {
                "episode_ids": [{"rollout_id": "r-1"}],
                "checkpoint_dir": play.server.directory(FIRST),
            }
            begun_s = asyncio.get_running_loop().time()
            reply = await play.server.control("commit", FIRST, within_s=1.0, **fields)
            assert asyncio.get_running_loop().time() - begun_s < 0.9
            assert reply["episode_ids"] == ["r-1"]
            asking.cancel()

    run(work())
