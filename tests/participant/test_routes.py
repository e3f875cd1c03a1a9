"""What a mounted participant answers over HTTP."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from pydantic import SecretStr

from gymckpt.errors import StaleAttempt, UsageError
from gymckpt.participant.directories import require_root
from gymckpt.participant.participant import Participant
from gymckpt.participant.routes import MAX_BODY_BYTES, mount
from gymckpt.settings import CheckpointSettings
from gymckpt.wire.control import PREFIX
from tests.participant.roles import CounterRole
from tests.participant.stand import A, X, Y

TOKEN = "s3cret-wörd"


def settings(root: Path | None = None) -> CheckpointSettings:
    return CheckpointSettings(enabled=True, control_auth_token=SecretStr(TOKEN), root=root)


def bearer(token: str | None) -> dict[bytes, bytes]:
    return {} if token is None else {b"authorization": b"Bearer " + token.encode("utf-8", "surrogateescape")}


class Served:
    """An app with one participant, called through ASGI."""

    def __init__(self, root: Path, role: CounterRole | None = None) -> None:
        self.app = FastAPI()
        self.role = role or CounterRole()

        @self.app.post("/plain")
        async def plain(request: Request) -> dict[str, Any]:
            episode = getattr(request.state, "episode", None)
            return {"path": request.url.path, "episode": str(episode) if episode else None}

        @self.app.post("/stale")
        async def stale() -> None:
            raise StaleAttempt("too late")

        participant = mount(self.app, self.role, settings(root))
        assert participant is not None
        self.participant: Participant = participant
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://participant")

    async def call(self, name: str, body: Any = None, *, token: str | None = TOKEN) -> httpx.Response:
        headers = bearer(token)
        if body is None:
            return await self.client.get(f"{PREFIX}/{name}", headers=headers)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.post(f"{PREFIX}/{name}", content=content, headers=headers)


def operation(checkpoint_id: str = X, **more: Any) -> dict[str, Any]:
    return {"checkpoint_id": checkpoint_id, "deadline_ts": time.time() + 20, **more}


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_a_whole_checkpoint_and_a_restore_over_http(tmp_path: Path) -> None:
    async def rule() -> None:
        served = Served(tmp_path)
        served.role.start(A)
        await served.role.bump(A)
        assert (await served.call("prepare", operation())).json()["phase"] == "prepared"
        assert set((await served.call("renew", operation())).json()) == {"lease_expires_at"}
        scope = [{"rollout_id": "a"}]
        commit = (await served.call("commit", operation(checkpoint_dir=str(tmp_path / X), episode_ids=scope))).json()
        assert set(commit) == {"phase", "manifest", "episode_ids", "needs_by_episode"}
        assert commit["episode_ids"] == ["a"]
        assert commit["needs_by_episode"] == {"a": [["resources", "tools"]]}
        assert (await served.call("resume", operation())).json() == {"phase": "idle", "idempotent": False}
        assert (await served.call("retire", operation(Y, episode_ids=scope))).json() == {"retired": ["a"]}
        restore = await served.call("restore", operation(Y, checkpoint_dir=str(tmp_path / X), episode_ids=scope))
        assert restore.json() == {"phase": "restored", "source_checkpoint_id": X, "restored": ["a-a1"]}
        await served.call("resume", operation(Y))
        forget = await served.call("forget", operation("r1", rollout_ids=["b"]))
        assert forget.json() == {"forgotten": ["b"]}

    run(rule())


def test_a_null_boundary_is_told_as_null(tmp_path: Path) -> None:
    async def rule() -> None:
        served = Served(tmp_path)
        served.role.start(A)
        await served.call("prepare", operation())
        commit = await served.call("commit", operation(checkpoint_dir=str(tmp_path / X), episode_ids=None))
        assert commit.json()["needs_by_episode"] == {"a": None}

    run(rule())


def test_the_status_has_null_where_nothing_is_active_and_only_the_fields_of_its_kind(tmp_path: Path) -> None:
    async def rule() -> None:
        status = (await Served(tmp_path).call("status")).json()
        assert status["checkpoint_id"] is None
        assert status["lease_expires_at"] is None
        assert status["restored_pending"] == 0
        assert {"mode", "verify", "accepting", "retired_sessions", "restored_generation_cuts"}.isdisjoint(status)

    run(rule())


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], "\udcff"])
def test_without_the_bearer_token_every_route_is_401_and_does_nothing(tmp_path: Path, token: str | None) -> None:
    async def rule() -> None:
        served = Served(tmp_path)
        headers = bearer(token)
        for name in ("prepare", "renew", "commit", "restore", "resume", "retire", "forget", "probe", "status"):
            method = "GET" if name == "status" else "POST"
            reply = await served.client.request(method, f"{PREFIX}/{name}", headers=headers, content=b"{")
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "unauthorized"
            assert TOKEN not in reply.text
        assert served.participant.phase == "idle"
        assert served.participant.counters["refused.unauthorized"] == 9

    run(rule())


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 422, "invalid_request"),
        (b"not json", 422, "invalid_request"),
        (b"[]", 422, "invalid_request"),
        ({"checkpoint_id": X}, 422, "invalid_request"),
        ({"checkpoint_id": X, "deadline_ts": 1e12, "unknown": 1}, 422, "invalid_request"),
        ({"checkpoint_id": "../x", "deadline_ts": 1e12}, 422, "invalid_request"),
        ({"checkpoint_id": "x" * 129, "deadline_ts": 1e12}, 422, "invalid_request"),
        (b'{"checkpoint_id": "x", "deadline_ts": NaN}', 422, "invalid_request"),
        (b'{"checkpoint_id": "x", "deadline_ts": 1e999}', 422, "invalid_request"),
        ({"checkpoint_id": X, "deadline_ts": "1e12"}, 422, "invalid_request"),
        ({"checkpoint_id": X, "deadline_ts": True}, 422, "invalid_request"),
        (b'{"checkpoint_id": "\\ud800", "deadline_ts": 1}', 422, "invalid_request"),
        (b"[" * 60_000, 422, "invalid_request"),
        ({"checkpoint_id": X, "deadline_ts": 1.0}, 409, "deadline_exceeded"),
    ],
)
def test_a_body_that_is_no_such_message_is_refused_with_one_clear_error(
    tmp_path: Path, body: Any, status: int, code: str
) -> None:
    async def rule() -> None:
        reply = await Served(tmp_path).call("prepare", body)
        assert reply.status_code == status
        error = reply.json()["error"]
        assert error["code"] == code
        assert 0 < len(error["detail"]) < 1000

    run(rule())


def test_a_rollout_id_that_is_no_safe_name_is_400(tmp_path: Path) -> None:
    async def rule() -> None:
        for rollout_id in ("a/b", "a-a1", ""):
            reply = await Served(tmp_path).call("retire", operation(episode_ids=[{"rollout_id": rollout_id}]))
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_rollout_id")

    run(rule())


@pytest.mark.parametrize("name", ["prepare", "commit"])
def test_a_body_without_bound_is_not_read(tmp_path: Path, name: str) -> None:
    async def rule() -> None:
        sent = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal sent
            while sent <= 2 * MAX_BODY_BYTES:
                sent += 8 << 20
                yield bytes(8 << 20)

        served = Served(tmp_path)
        headers = bearer(TOKEN)
        reply = await served.client.post(f"{PREFIX}/{name}", content=endless(), headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")

    run(rule())


def test_a_body_that_says_that_it_is_too_long_is_refused_before_it_comes(tmp_path: Path) -> None:
    async def rule() -> None:
        asked = False

        async def never() -> AsyncIterator[bytes]:
            nonlocal asked
            asked = True
            yield b"{}"

        headers = {**bearer(TOKEN), b"content-length": b"%d" % (40 << 20)}
        reply = await Served(tmp_path).client.post(f"{PREFIX}/renew", content=never(), headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert not asked

    run(rule())


def test_a_scope_of_ten_thousand_episodes_is_taken(tmp_path: Path) -> None:
    async def rule() -> None:
        episodes = [{"rollout_id": f"rollout-number-{number}", "attempt": 1} for number in range(10_000)]
        reply = await Served(tmp_path).call("retire", operation(episode_ids=episodes))
        assert len(reply.json()["retired"]) == 10_000

    run(rule())


def test_a_refusal_has_its_code_detail_and_status(tmp_path: Path) -> None:
    async def rule() -> None:
        served = Served(tmp_path)
        commit = await served.call("commit", operation(checkpoint_dir="/nowhere", episode_ids=None))
        assert commit.status_code == 409
        assert set(commit.json()) == {"error"}
        assert set(commit.json()["error"]) == {"code", "detail"}
        assert commit.json()["error"]["code"] == "invalid_phase"
        await served.call("prepare", operation())
        outside = await served.call("commit", operation(checkpoint_dir="/nowhere", episode_ids=None))
        assert (outside.status_code, outside.json()["error"]["code"]) == (422, "invalid_checkpoint_state")
        assert served.participant.counters["refused.invalid_phase"] == 1
        assert served.participant.counters["refused.invalid_checkpoint_state"] == 1

    run(rule())


def test_a_prepare_that_misses_its_deadline_is_200_with_phase_preparing(tmp_path: Path) -> None:
    async def rule() -> None:
        served = Served(tmp_path)
        with served.role.gate.in_flight("a"):
            reply = await served.call("prepare", {"checkpoint_id": X, "deadline_ts": time.time() + 0.2})
        assert reply.status_code == 200
        assert reply.json()["phase"] == "preparing"
        assert reply.json()["report"]["blockers"] == ["a"]

    run(rule())


def test_a_refusal_on_the_servers_own_routes_is_answered_and_counted_the_same_way(tmp_path: Path) -> None:
    async def rule() -> None:
        served = Served(tmp_path)
        reply = await served.client.post("/stale")
        assert (reply.status_code, reply.json()) == (409, {"error": {"code": "stale_attempt", "detail": "too late"}})
        assert served.participant.counters["refused.stale_attempt"] == 1

    run(rule())


def test_the_rollout_prefix_leads_to_the_plain_route_with_its_episode(tmp_path: Path) -> None:
    async def rule() -> None:
        client = Served(tmp_path).client
        assert (await client.post("/plain")).json() == {"path": "/plain", "episode": None}
        assert (await client.post("/ng-rollout/a/plain")).json()["episode"] == "a"
        assert (await client.post("/ng-rollout/a-a12/plain")).json() == {"path": "/plain", "episode": "a-a12"}
        assert (await client.post("/ng-rollout/a/none")).status_code == 404
        assert (await client.post("/ng-rollout")).status_code == 404

    run(rule())


@pytest.mark.parametrize("key", ["", "-a1", "a%2Fb", "a b", "%00", "x" * 200, "a-a9999999999999"])
def test_a_capture_key_that_is_no_safe_name_reaches_nothing(tmp_path: Path, key: str) -> None:
    async def rule() -> None:
        reply = await Served(tmp_path).client.post(f"/ng-rollout/{key}/plain")
        assert reply.status_code in (400, 404)
        if reply.status_code == 400:
            assert reply.json()["error"]["code"] == "invalid_rollout_id"

    run(rule())


def test_with_checkpointing_off_nothing_is_added_to_the_app() -> None:
    bare, app = FastAPI(), FastAPI()
    assert mount(app, CounterRole(), CheckpointSettings()) is None
    assert [route.path for route in app.routes] == [route.path for route in bare.routes]  # type: ignore[attr-defined]
    assert app.user_middleware == []
    assert app.exception_handlers.keys() == bare.exception_handlers.keys()


def test_a_probe_tells_whether_the_same_files_are_seen(tmp_path: Path) -> None:
    async def rule() -> None:
        served = Served(tmp_path / "root")
        place = tmp_path / "root" / "run" / "probe"
        place.parent.mkdir(parents=True)
        place.write_text("0123456789abcdef0123\n")
        seen = await served.call("probe", {"path": str(place), "nonce": "0123456789abcdef0123"})
        assert seen.json()["seen"] is True
        assert seen.json()["free_bytes"] > 0
        other = await served.call("probe", {"path": str(place), "nonce": "0123456789abcdef0124"})
        assert other.json()["seen"] is False
        missing = await served.call("probe", {"path": f"{place}-missing", "nonce": "0123456789abcdef0123"})
        assert missing.json()["seen"] is False
        outside = await served.call("probe", {"path": "/etc/passwd", "nonce": "0123456789abcdef0123"})
        assert outside.status_code == 422

    run(rule())


def test_a_root_is_required_beyond_loopback(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost"):
        require_root(settings(), host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "node-17"):
        with pytest.raises(UsageError, match=r"checkpoint\.root"):
            require_root(settings(), host)
        require_root(settings(tmp_path), host)
        require_root(CheckpointSettings(), host)


def test_the_apps_own_lifespan_still_runs_and_ends_what_the_participant_began(tmp_path: Path) -> None:
    async def rule() -> None:
        steps: list[str] = []

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
            steps.append("up")
            yield {"mine": 1}
            steps.append("down")

        app = FastAPI(lifespan=lifespan)
        participant = mount(app, CounterRole(), settings(tmp_path))
        assert participant is not None
        async with app.router.lifespan_context(app) as state:
            assert state == {"mine": 1}
            participant._state.spawn(asyncio.sleep(1000))
        assert steps == ["up", "down"]
        assert not participant._state._tasks

    run(rule())


def test_a_real_server_tells_its_time_in_every_reply(tmp_path: Path) -> None:
    async def rule() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            server = uvicorn.Server(uvicorn.Config(Served(tmp_path).app, log_level="critical"))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            async with httpx.AsyncClient() as client:
                reply = await client.get(f"http://127.0.0.1:{port}{PREFIX}/status")
                assert reply.status_code == 401
                assert reply.headers["date"].endswith("GMT")
            server.should_exit = True
            await serving

    run(rule())
