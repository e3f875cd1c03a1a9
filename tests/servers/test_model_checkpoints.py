"""Rules of the policy model server as a participant, through its own routes."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.ports import ThreadOffload
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.worker import build
from gymckpt.settings import CheckpointSettings
from gymckpt.storage.files import LocalFileSystem
from gymckpt.storage.reader import ParticipantReader
from tests.servers.policy import HeldWorker, Policy, policy, refs


def run(directory: Path, work: Callable[[Policy], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def everything() -> None:
        async with policy(directory, **options) as server:
            await work(server)

    asyncio.run(everything())


async def record(directory: Path, checkpoint: str, key: str) -> dict[str, Any]:
    part = directory / "checkpoints" / checkpoint / "gym" / "model" / "policy_model"
    reader = ParticipantReader(
        LocalFileSystem(), ThreadOffload(), part, kind="model", instance="policy_model", max_record_bytes=1 << 20
    )
    await reader.open()
    found = [stored.record async for stored in reader.records(None) if stored.episode == EpisodeId.parse(key)]
    assert len(found) == 1
    return found[0]


def conversation(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    """User texts, each with the id of the message that answered it."""
    items: list[dict[str, Any]] = []
    for text, answer_id in turns:
        items.append({"role": "user", "content": text})
        if answer_id:
            content = [{"type": "output_text", "text": f"echo: {text}"}]
            items.append({"type": "message", "role": "assistant", "id": answer_id, "content": content})
    return items


def test_prepare_and_commit_finish_while_a_call_is_out_and_its_response_comes_once_after_resume(tmp_path: Path) -> None:
    async def work(server: Policy) -> None:
        assert (await server.ask("r-1", "one")).status_code == 200
        server.worker.gate.clear()
        held = server.asking("r-1", {"input": conversation(("one", "msg_1"), ("two", ""))})
        await server.worker.wait_for_calls(2)
        committed = await server.checkpoint("ckpt-000001-00000000", "r-1", resume=False)
        assert committed["episode_ids"] == ["r-1"]
        server.worker.gate.set()
        newcomer = server.asking("r-2", "three")
        done, _ = await asyncio.wait([held, newcomer], timeout=0.1)
        assert not done
        assert len(server.worker.seen) == 2
        await server.control("resume", "ckpt-000001-00000000")
        assert (await held).json()["output"][0]["content"][0]["text"] == "echo: two"
        assert (await newcomer).status_code == 200
        assert len(server.worker.seen) == 3
        exported = await record(tmp_path, "ckpt-000001-00000000", "r-1")
        assert [row["index"] for row in exported["rows"]] == [0]
        assert exported["generation_cuts"] == []
        await server.checkpoint("ckpt-000002-00000000", "r-1", "r-2")
        exported = await record(tmp_path, "ckpt-000002-00000000", "r-1")
        assert [row["lineage"] for row in exported["rows"]] == ["root", "resolved"]
        assert exported["rows"][1]["parent"] == exported["rows"][0]["call_id"]

    run(tmp_path, work)


def test_calls_without_a_capture_key_pass_while_closed_and_survive_every_retire(tmp_path: Path) -> None:
    async def work(server: Policy) -> None:
        await server.control("prepare", "ckpt-000001-00000000")
        assert (await server.ask(None, "judge me")).status_code == 200
        await server.control("resume", "ckpt-000001-00000000")
        server.worker.gate.clear()
        judge, covered, other = (server.asking(key, "x") for key in (None, "r-1", "r-2"))
        await server.worker.wait_for_calls(4)
        reply = await server.control("retire", "ckpt-000002-00000000", episode_ids=refs("r-1-a3"))
        assert reply["retired"] == ["r-1-a3"]
        assert (await covered).json()["error"]["code"] == "stale_attempt"
        server.worker.gate.set()
        assert [(await call).status_code for call in (judge, other)] == [200, 200]
        assert server.worker.cancelled == 1

    run(tmp_path, work)


def test_a_waiting_call_of_a_retired_attempt_ends_and_a_late_one_is_refused(tmp_path: Path) -> None:
    async def work(server: Policy) -> None:
        await server.ask("r-1", "one")
        await server.checkpoint("ckpt-000001-00000000", "r-1")
        await server.control("retire", "ckpt-000002-00000000", episode_ids=refs("r-1"))
        await server.control(
            "restore",
            "ckpt-000003-00000000",
            episode_ids=refs("r-1"),
            checkpoint_dir=server.directory("ckpt-000001-00000000"),
        )
        waiting = server.asking("r-1-a1", "two")
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        await server.control("retire", "ckpt-000003-00000000", episode_ids=refs("r-1-a1"))
        assert (await waiting).status_code == 409
        await server.control("resume", "ckpt-000003-00000000")
        for key in ("r-1", "r-1-a1"):
            assert (await server.ask(key, "late")).json()["error"]["code"] == "stale_attempt"
        assert (await server.ask("r-1-a2", "next")).status_code == 200

    run(tmp_path, work)


def test_a_restored_rollout_goes_on_counting_and_makes_its_undelivered_call_again(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"

    async def first(server: Policy) -> None:
        await server.ask("r-1", "one")
        server.worker.gate.clear()
        lost = server.asking("r-1", {"input": conversation(("one", "msg_1"), ("two", ""))})
        await server.worker.wait_for_calls(2)
        reply = await server.checkpoint("ckpt-000001-00000000", "r-1")
        assert reply["staging_keys_by_episode"]["r-1"] == reply["staging_keys"] != []
        server.worker.gate.set()
        await lost
        await server.ask("r-1", {"input": conversation(("one", "msg_1"), ("two", "msg_2"), ("three", ""))})

    async def second(server: Policy) -> None:
        reply = await server.restore("ckpt-000001-00000000", "ckpt-000002-00000000", "r-1")
        assert reply["restored"] == ["r-1-a1"]
        await server.ask("r-1-a1", {"input": conversation(("one", "msg_1"), ("two", ""))})
        await server.checkpoint("ckpt-000003-00000000", "r-1-a1")
        rows = (await record(tmp_path, "ckpt-000003-00000000", "r-1-a1"))["rows"]
        assert [(row["index"], row["capture_key"]) for row in rows] == [(0, "r-1"), (1, "r-1-a1")]
        assert rows[1]["lineage"] == "resolved"

    run(tmp_path, first, audit_path=audit)
    run(tmp_path, second, audit_path=audit)
    lines = [jsoncodec.loads(line) for line in audit.read_bytes().splitlines()]
    assert [(line["attempt"], line["call"], line["kind"]) for line in lines] == [
        (0, 0, "model"),
        (0, 1, "model"),
        (0, 2, "model"),
        (1, 1, "model"),
    ]


def test_a_response_that_the_restored_agent_never_got_is_replaced_at_its_own_index(tmp_path: Path) -> None:
    async def first(server: Policy) -> None:
        await server.ask("r-1", "one")
        await server.checkpoint("ckpt-000001-00000000", "r-1")

    async def second(server: Policy) -> None:
        await server.restore("ckpt-000001-00000000", "ckpt-000002-00000000", "r-1")
        await server.ask("r-1-a1", "one")
        await server.ask("r-1-a1", {"input": conversation(("one", "msg_1"), ("two", ""))})
        await server.checkpoint("ckpt-000003-00000000", "r-1-a1")
        rows = (await record(tmp_path, "ckpt-000003-00000000", "r-1-a1"))["rows"]
        assert [row["index"] for row in rows] == [0, 0, 1]
        assert rows[1]["repeats"] == rows[0]["call_id"]

    run(tmp_path, first)
    run(tmp_path, second)


def test_a_server_started_again_is_empty_and_its_leftovers_never_reach_an_export(tmp_path: Path) -> None:
    async def first(server: Policy) -> None:
        await server.ask("r-1", "one")

    async def second(server: Policy) -> None:
        await server.ask("r-1", {"input": conversation(("one", "msg_1"), ("two", ""))})
        await server.checkpoint("ckpt-000001-00000000", "r-1", "r-0")
        rows = (await record(tmp_path, "ckpt-000001-00000000", "r-1"))["rows"]
        assert [(row["index"], row["lineage"]) for row in rows] == [(0, "unresolved")]

    run(tmp_path, first)
    run(tmp_path, second)


def test_a_failure_is_held_like_a_response_and_leaves_no_row(tmp_path: Path) -> None:
    async def work(server: Policy) -> None:
        server.worker.gate.clear()
        failing = server.asking("r-1", {"input": "x", "fail": 400})
        await server.worker.wait_for_calls(1)
        await server.control("prepare", "ckpt-000001-00000000")
        server.worker.gate.set()
        done, _ = await asyncio.wait([failing], timeout=0.05)
        assert not done
        await server.control("resume", "ckpt-000001-00000000")
        assert (await failing).status_code == 400
        await server.checkpoint("ckpt-000002-00000000", "r-1")
        assert (await record(tmp_path, "ckpt-000002-00000000", "r-1"))["rows"] == []

    run(tmp_path, work)


def test_an_episode_said_to_be_a_restart_is_reported_and_never_exported(tmp_path: Path) -> None:
    async def work(server: Policy) -> None:
        headers = {"x-ng-checkpoint-restart": "1"}
        await server._client.post("/ng-rollout/r-1/v1/responses", json={"input": "x"}, headers=headers)
        await server.ask("r-2", "y")
        assert (await server.status())["report"]["restarts"] == ["r-1"]
        reply = await server.checkpoint("ckpt-000001-00000000", "r-2")
        assert reply["episode_ids"] == ["r-2"]

    run(tmp_path, work)


def test_a_restore_needs_a_server_without_rollout_calls_and_judges_do_not_count(tmp_path: Path) -> None:
    async def work(server: Policy) -> None:
        await server.ask("r-1", "one")
        await server.checkpoint("ckpt-000001-00000000", "r-1")
        server.worker.gate.clear()
        judge, call = server.asking(None, "judge"), server.asking("r-1", "two")
        await server.worker.wait_for_calls(3)
        source = server.directory("ckpt-000001-00000000")
        refused = await server.try_control(
            "restore", "ckpt-000002-00000000", episode_ids=refs("r-1"), checkpoint_dir=source
        )
        assert refused.status_code == 409
        await server.control("retire", "ckpt-000003-00000000", episode_ids=refs("r-1"))
        assert (await call).status_code == 409
        await server.restore("ckpt-000001-00000000", "ckpt-000004-00000000", "r-1")
        server.worker.gate.set()
        assert (await judge).status_code == 200

    run(tmp_path, work)


def test_a_scope_of_everything_is_refused(tmp_path: Path) -> None:
    async def work(server: Policy) -> None:
        await server.control("prepare", "ckpt-000001-00000000")
        reply = await server.try_control(
            "commit", "ckpt-000001-00000000", episode_ids=None, checkpoint_dir=server.directory("c")
        )
        assert reply.json()["error"]["code"] == "checkpoint_error"

    run(tmp_path, work)


def test_the_scripted_worker_behind_it_gives_both_apis_and_the_policy_version(tmp_path: Path) -> None:
    worker = build("worker", {}, CheckpointSettings(), Neighbours({}))

    async def work(server: Policy) -> None:
        assert (await server.ask("r-1", "What is 6 x 7?")).status_code == 200
        chat = {"messages": [{"role": "user", "content": "What is 6 x 7?"}]}
        assert (await server.ask("r-1", chat, "/v1/chat/completions")).status_code == 200
        await server.checkpoint("ckpt-000001-00000000", "r-1")
        rows = (await record(tmp_path, "ckpt-000001-00000000", "r-1"))["rows"]
        assert [row["policy_version"] for row in rows] == ["scripted-1"] * 2
        assert all(row["output_tokens"] > 0 and row["prompt_tokens"] > 0 for row in rows)

    run(tmp_path, work, apps={"http://worker": worker}, worker=HeldWorker())


def test_a_retire_under_load_cancels_exactly_the_covered_calls(tmp_path: Path) -> None:
    async def work(server: Policy) -> None:
        server.worker.gate.clear()
        keys = [f"r-{n}-a1" for n in range(20)]
        calls = {key: [server.asking(key, f"{key} {n}") for n in range(3)] for key in keys}
        calls |= {f"judge-{n}": [server.asking(None, "judge")] for n in range(20)}
        total = sum(len(group) for group in calls.values())
        await server.worker.wait_for_calls(total)
        retired = [f"r-{n}-a1" for n in range(0, 20, 2)]
        reply = await server.control("retire", "ckpt-000001-00000000", episode_ids=refs(*retired))
        assert sorted(reply["retired"]) == sorted(retired)
        assert server.worker.cancelled == 3 * len(retired)
        server.worker.gate.set()
        for key, group in calls.items():
            wanted = 409 if key in retired else 200
            assert [(await call).status_code for call in group] == [wanted] * len(group)
        await server.checkpoint("ckpt-000002-00000000", *[key for key in keys if key not in retired])

    run(tmp_path, work)


def test_a_later_attempt_fences_the_calls_of_an_earlier_one_even_without_a_retire(tmp_path: Path) -> None:
    async def work(server: Policy) -> None:
        server.worker.gate.clear()
        early = server.asking("r-1", "early")
        await server.worker.wait_for_calls(1)
        late = server.asking("r-1-a1", "late")
        await server.worker.wait_for_calls(2)
        server.worker.gate.set()
        assert (await early).json()["error"]["code"] == "stale_attempt"
        assert (await late).status_code == 200
        assert (await server.ask("r-1", "again")).status_code == 409
        await server.checkpoint("ckpt-000001-00000000", "r-1", "r-1-a1")
        rows = (await record(tmp_path, "ckpt-000001-00000000", "r-1-a1"))["rows"]
        assert [row["capture_key"] for row in rows] == ["r-1-a1"]

    run(tmp_path, work)


def test_a_record_that_is_none_restores_nothing_and_leaves_the_server_open(tmp_path: Path) -> None:
    async def work(server: Policy) -> None:
        part = tmp_path / "checkpoints" / "broken" / "gym" / "model" / "policy_model"
        part.mkdir(parents=True)
        rows = [{"call_id": "a"}, {"call_id": "a"}]
        line = jsoncodec.dumps({"episode_id": {"rollout_id": "r-1", "attempt": 0}, "rows": rows, "generation_cuts": []})
        digest = hashlib.sha256(line + b"\n").hexdigest()
        (part / f"records-{digest}.jsonl").write_bytes(line + b"\n")
        manifest = {
            "schema_version": 1,
            "kind": "model",
            "instance": "policy_model",
            "checkpoint_id": "ckpt-000001-00000000",
            "records_file": f"records-{digest}.jsonl",
            "records_sha256": digest,
            "record_count": 1,
        }
        (part / "manifest.json").write_bytes(jsoncodec.dumps(manifest))
        source = str(tmp_path / "checkpoints" / "broken")
        reply = await server.try_control(
            "restore", "ckpt-000002-00000000", episode_ids=refs("r-1"), checkpoint_dir=source
        )
        assert reply.status_code == 422
        assert "two rows" in reply.json()["error"]["detail"]
        assert (await server.status())["phase"] == "idle"
        assert (await server.ask("r-2", "x")).status_code == 200

    run(tmp_path, work)
