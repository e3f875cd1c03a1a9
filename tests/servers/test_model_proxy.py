"""Rules of the policy model server as a proxy: what goes out, what comes back, which backend is asked."""

import asyncio
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from gymckpt.errors import BackendUnavailable, UsageError
from gymckpt.ports import SystemClock
from gymckpt.roles import model_backends
from gymckpt.roles.model_backends import BREAKS_ALLOWED, Backends, BackendSettings, backend
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.model import build
from gymckpt.settings import CheckpointSettings
from tests.servers.policy import AppTransport, HeldWorker, policy

DISABLED = CheckpointSettings()


def test_with_checkpoints_disabled_there_is_no_route_no_header_and_no_bookkeeping(tmp_path: Path) -> None:
    async def run() -> None:
        async with policy(tmp_path, checkpoint=DISABLED) as server:
            assert (await server.ask("r-1", "one")).status_code == 200
            assert (await server.ask(None, "two")).status_code == 200
            assert (await server.try_control("prepare", "ckpt-000001-00000000")).status_code == 404
            assert not any(name.startswith("x-ng") for headers in server.worker.headers for name in headers)
            assert not (tmp_path / "ledger").exists()

    asyncio.run(run())


def test_unknown_request_keys_reach_the_backend_unchanged_and_only_the_model_is_set(tmp_path: Path) -> None:
    async def run() -> None:
        async with policy(tmp_path, model="the-model") as server:
            body = {"input": "x", "strange": {"b": [1, None, 2**70], "a": 0.1}, "model": "asked-for"}
            await server.ask("r-1", body)
            await server.ask(None, body)
            assert server.worker.seen == [{**body, "model": "the-model"}] * 2
            assert list(server.worker.seen[0]) == list(body)

    asyncio.run(run())


def test_a_backend_that_refuses_connections_is_tried_again_until_it_is_there_and_counts_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with policy(tmp_path, backend_urls=["http://late"], outage_patience_s=20) as server:
            asking = server.asking("r-1", "x")
            await server.transport.refused.wait()
            server.transport.apps["http://late"] = server.worker.app
            assert (await asking).status_code == 200
            assert len(server.worker.seen) == 1
            await server.checkpoint("ckpt-000001-00000000", "r-1")

    asyncio.run(run())


def test_backends_that_stay_away_end_the_call_by_name(tmp_path: Path) -> None:
    async def run() -> None:
        async with policy(tmp_path, backend_urls=["http://gone", "http://lost"], outage_patience_s=0.3) as server:
            reply = await server.ask("r-1", "x")
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "backend_unavailable"
            assert "http://gone" in reply.json()["error"]["detail"]

    asyncio.run(run())


@pytest.mark.parametrize("trouble", ["broken", 429, 500, 502, 503, 504])
def test_a_call_outlives_a_backend_that_breaks_or_is_away_and_counts_once(tmp_path: Path, trouble: int | str) -> None:
    async def run() -> None:
        async with policy(tmp_path) as server:
            server.worker.troubles = [trouble] * (BREAKS_ALLOWED - 1)
            assert (await server.ask("r-1", "x")).status_code == 200
            assert len(server.worker.seen) == BREAKS_ALLOWED
            assert (await server.ask(None, "judge")).status_code == 200
            assert "backends_away" not in (await server.status())["report"]["counts"]
            committed = await server.checkpoint("ckpt-000001-00000000", "r-1")
            assert len(committed["staging_keys"]) == 1

    asyncio.run(run())


@pytest.mark.parametrize(("trouble", "status"), [("broken", 502), (500, 500), (504, 504)])
def test_a_call_that_breaks_every_backend_is_not_made_for_ever(tmp_path: Path, trouble: int | str, status: int) -> None:
    async def run() -> None:
        async with policy(tmp_path) as server:
            server.worker.troubles = [trouble] * 100
            assert (await server.ask("r-1", "x")).status_code == status
            assert len(server.worker.seen) == BREAKS_ALLOWED

    asyncio.run(run())


def test_a_busy_backend_is_left_alone_for_the_time_it_asked_for_and_others_take_its_calls(tmp_path: Path) -> None:
    async def run() -> None:
        busy, free = HeldWorker(), HeldWorker()
        busy.troubles, busy.retry_after = [503] * 100, "60"
        apps = {"http://busy": busy.app, "http://free": free.app}
        async with policy(tmp_path, apps=apps, backend_urls=list(apps)) as server:
            replies = await asyncio.gather(*(server.ask(f"r-{number}", "x") for number in range(8)))
            assert [reply.status_code for reply in replies] == [200] * 8
            seen = len(busy.seen)
            assert seen
            await asyncio.gather(*(server.ask(f"r-{number}", "y") for number in range(8)))
            assert (len(busy.seen), len(free.seen)) == (seen, 16)
            assert (await server.status())["report"]["counts"]["backends_away"] == 1

    asyncio.run(run())


def test_a_rollout_stays_with_its_backend_and_moves_only_when_that_is_down(tmp_path: Path) -> None:
    async def run() -> None:
        workers = {f"http://w{n}": HeldWorker() for n in range(3)}
        apps = {url: worker.app for url, worker in workers.items()}
        async with policy(tmp_path, apps=apps, backend_urls=list(apps)) as server:
            for number in range(30):
                for _ in range(3):
                    await server.ask(f"r-{number}", "x")
            counts = {url: len(worker.seen) for url, worker in workers.items()}
            assert sum(counts.values()) == 90
            assert all(count and count % 3 == 0 for count in counts.values())
            del server.transport.apps["http://w1"]
            replies = [await server.ask(f"r-{number}", "x") for number in range(30)]
            assert [reply.status_code for reply in replies] == [200] * 30
            assert len(workers["http://w1"].seen) == counts["http://w1"]

    asyncio.run(run())


def test_more_calls_than_allowed_wait_their_turn(tmp_path: Path) -> None:
    async def run() -> None:
        async with policy(tmp_path, max_concurrency=2) as server:
            server.worker.gate.clear()
            calls = [server.asking(None, str(n)) for n in range(5)]
            await server.worker.wait_for_calls(2)
            await asyncio.sleep(0.02)
            assert len(server.worker.seen) == 2
            server.worker.gate.set()
            assert [reply.status_code for reply in await asyncio.gather(*calls)] == [200] * 5

    asyncio.run(run())


@pytest.mark.parametrize("key", ["r-1", None])
def test_a_caller_that_wants_a_stream_gets_events_that_add_up_to_the_answer(tmp_path: Path, key: str | None) -> None:
    async def run() -> None:
        async with policy(tmp_path) as server:
            reply = await server.ask(key, {"input": "x", "stream": True})
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert reply.text.count("event: response.completed") == 1
            assert '"delta":"echo: x"' in reply.text
            assert "stream" not in server.worker.seen[0]
            chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
            events = (await server.ask(key, chat, "/v1/chat/completions")).text
            assert '"content":"echo: x"' in events
            assert events.endswith("data: [DONE]\n\n")
            await server.checkpoint("ckpt-000001-00000000", "r-1")

    asyncio.run(run())


def test_a_stream_that_cannot_be_answered_ends_with_a_failure(tmp_path: Path) -> None:
    async def run() -> None:
        async with policy(tmp_path) as server:
            reply = await server.ask("r-1", {"input": "x", "stream": True, "fail": 400})
            assert "event: response.failed" in reply.text

    asyncio.run(run())


def test_options_that_make_no_sense_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for options in (
        {},
        {"backend": "worker", "backend_urls": ["http://x"]},
        {"backend_urls": ["http://x"], "surprise": 1},
        {"backend": "absent"},
        {"backend_urls": ["http://x"], "api_key_env": "NO_SUCH_KEY"},
    ):
        with pytest.raises(UsageError):
            build("policy_model", options, DISABLED, Neighbours({}))


@pytest.mark.parametrize("status", [401, 500, 503])
def test_a_key_that_a_backend_repeats_reaches_no_caller_and_no_log(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI()

    @app.post("/v1/responses")
    async def refuse(request: Request) -> JSONResponse:
        return JSONResponse({"error": request.headers["authorization"]}, status)

    async def run() -> str:
        transport = AppTransport({"http://echo": app})
        settings = BackendSettings(api_key="sk-secret-0123456789", outage_patience_s=0.2)
        backends = Backends([backend("echo", "http://echo")], transport, SystemClock(), settings)
        try:
            return (await backends.call("/v1/responses", {"input": "x"}, rollout_id=None)).body.decode()
        except BackendUnavailable as error:
            return error.detail

    told = asyncio.run(run())
    assert "[the API key]" in told
    assert "sk-secret" not in told + caplog.text


def test_a_backend_that_hangs_gets_no_calls_until_it_answers_its_health_check_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_backends, "HEALTH_TIMEOUT_S", 0.05)

    async def run() -> None:
        sick, well = HeldWorker(), HeldWorker()
        transport = AppTransport({"http://sick": sick.app, "http://well": well.app})
        asked = [backend("sick", "http://sick"), backend("well", "http://well/v1/")]
        backends = Backends(asked, transport, SystemClock(), BackendSettings())

        async def ask_all() -> None:
            body = {"input": "x"}
            await asyncio.gather(*(backends.call("/v1/responses", body, rollout_id=f"r-{n}") for n in range(20)))

        sick.healthy.clear()
        await backends.check()
        await ask_all()
        assert (len(sick.seen), len(well.seen)) == (0, 20)
        sick.healthy.set()
        await backends.check()
        await ask_all()
        assert sick.seen

    asyncio.run(run())


def test_a_caller_that_goes_away_stops_its_call_and_blocks_no_checkpoint(tmp_path: Path) -> None:
    async def run() -> None:
        async with policy(tmp_path) as server:
            server.worker.gate.clear()
            gone = server.asking("r-1", "x")
            await server.worker.wait_for_calls(1)
            gone.cancel()
            await asyncio.wait([gone])
            assert server.worker.cancelled == 1
            await server.checkpoint("ckpt-000001-00000000", "r-1")

    asyncio.run(run())
