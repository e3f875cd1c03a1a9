"""The parts of the wrappers that need no NeMo Gym: they run with the other quick tests."""

import asyncio
import random
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from itsdangerous import TimestampSigner, URLSafeSerializer
from starlette.middleware.sessions import SessionMiddleware

from gymckpt.errors import CheckpointConflict, StaleAttempt, UsageError
from gymckpt.identity import EpisodeId
from gymckpt.integrations.nemo_gym.adapters import Adapter, Blackjack, Counters
from gymckpt.integrations.nemo_gym.attaching import attach, kind_of, participating
from gymckpt.integrations.nemo_gym.cookies import renewed, session_id_of, with_session_id
from gymckpt.integrations.nemo_gym.declarations import DECLARATIONS, adapter_for
from gymckpt.integrations.nemo_gym.exchange import Answer
from gymckpt.integrations.nemo_gym.mcp_tokens import McpTokens
from gymckpt.integrations.nemo_gym.owners import OwnerRole
from gymckpt.jsoncodec import dumps, loads
from gymckpt.participant.marks import Marks
from gymckpt.servers.resources.server import SessionLost
from gymckpt.settings import CheckpointSettings

EPISODE = EpisodeId("r-1")
COOKIE = "Desk___desk"
SETTINGS = CheckpointSettings(enabled=True, control_auth_token="token")  # type: ignore[arg-type]


class SimpleResourcesServer:
    """In the place of Gym's base class, which is told by its name."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(name="desk", num_workers=None, host="127.0.0.1")
        self.server_client: Any = None
        self.notes: dict[str, list[str]] = {}

    def get_session_middleware_key(self) -> str:
        return COOKIE

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()

        @app.post("/seed_session")
        async def seed(request: Request) -> dict[str, str]:
            session_id = request.session["session_id"] = request.session["session_id"]  # so that it is sent back
            self.notes[session_id] = [(await request.json())["first"]]
            return {}

        @app.post("/write")
        async def write(request: Request) -> dict[str, list[str]]:
            notes = self.notes.setdefault(request.session.get("session_id", ""), [])
            notes.append((await request.json())["note"])
            return {"notes": notes}

        app.add_middleware(SessionMiddleware, secret_key=COOKIE, session_cookie=COOKIE)
        return app


class Desk(SimpleResourcesServer):
    pass


def client_of(server: Desk) -> httpx.AsyncClient:
    app = server.setup_webserver()
    attach(server, app, SETTINGS)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://desk")


def seed_body(caller: str = "caller-1") -> dict[str, Any]:
    reference = {"rollout_id": "r-1", "attempt": 0}
    return {"resources_session_id": caller, "episode_id": reference, "task_data": {"first": "hello"}}


def test_a_server_that_seeds_from_flat_fields_takes_a_typed_seed_and_says_what_it_cannot_capture() -> None:
    async def talk() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        async with client_of(Desk()) as client:
            seeded = await client.post("/seed_session", json=seed_body())
            again = await client.post("/seed_session", json=seed_body())
            return seeded, again, await client.post("/write", json={"note": "more"})

    seeded, again, written = asyncio.run(talk())
    assert seeded.json() == {"resources_session_id": "caller-1", "resources_tools": None, "sandbox_access": None}
    assert seeded.headers["x-ng-checkpoint-restart"] == "1"
    assert again.content == seeded.content
    assert written.json() == {"notes": ["hello", "more"]}


def test_a_session_that_the_server_lost_is_refused_instead_of_begun_empty() -> None:
    async def talk() -> httpx.Response:
        async with client_of(Desk()) as first:
            await first.post("/seed_session", json=seed_body())
            cookies = first.cookies
        async with client_of(Desk()) as restarted:
            restarted.cookies = cookies
            return await restarted.post("/write", json={"note": "more"})

    refused = asyncio.run(talk())
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "unknown_session")


def test_a_seed_that_the_server_refuses_is_answered_with_its_own_answer_and_leaves_no_session() -> None:
    class Strict(Desk):
        def setup_webserver(self) -> FastAPI:
            app = super().setup_webserver()
            app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") != "/seed_session"]
            return app

    async def talk() -> tuple[httpx.Response, Any]:
        async with client_of(Strict()) as client:
            answer = await client.post("/seed_session", json=seed_body())
            status = await client.get("/ng-control/v1/checkpoint/status", headers={"authorization": "Bearer token"})
            return answer, status.json()["report"]

    answer, report = asyncio.run(talk())
    assert answer.status_code == 404
    assert (report["counts"]["sessions"], report["restarts"]) == (0, [])


def test_a_class_that_is_not_declared_or_was_changed_is_restart_only() -> None:
    assert adapter_for(Desk) is Adapter
    changed = type("MCQAResourcesServer", (Desk,), {"__module__": "resources_servers.mcqa.app"})
    changed.__qualname__ = "MCQAResourcesServer"
    assert f"{changed.__module__}:{changed.__qualname__}" in DECLARATIONS
    assert Adapter.checkpoint_mode == "restart_only"


def test_what_is_no_server_of_gym_is_named() -> None:
    assert kind_of(Desk) == "resources"
    with pytest.raises(UsageError, match="builtins:dict is no server class"):
        kind_of(dict)


class SimpleResponsesAPIModel:
    """In the place of Gym's base class for models."""


class Half(Adapter):
    checkpoint_mode = "exported"


class WithoutSuper(Adapter):
    def __init__(self, instance: str, server: Any) -> None:
        self.server = server


class Unmakeable(Adapter):
    def __init__(self, instance: str) -> None:
        super().__init__(instance, None)


@pytest.mark.parametrize(
    ("server_class", "adapter", "said"),
    [
        (dict, None, "builtins:dict is no server class"),
        ("Desk", None, "takes a server class of NeMo Gym, not 'Desk'"),
        (Desk, dict, "the adapter of Desk is <class 'dict'>: it must be a class of Adapter"),
        (Desk, "Adapter", "the adapter of Desk is 'Adapter'"),
        (Desk, Adapter("desk", None), "the adapter of Desk is <"),
        (SimpleResponsesAPIModel, Adapter, "is a server of kind model and takes no adapter"),
        (Desk, Half, "Half.checkpoint_mode is exported, but it has no export_session_state"),
    ],
)
def test_what_cannot_take_part_is_refused_when_it_is_asked_for(server_class: Any, adapter: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        participating(server_class, adapter)


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (Half, "Half.checkpoint_mode is exported"),
        (WithoutSuper, r"must call super\(\).__init__"),
        (Unmakeable, "Unmakeable.* cannot be made: TypeError"),
    ],
)
def test_an_adapter_that_cannot_serve_is_refused_at_the_start(adapter: Any, said: str) -> None:
    server = Desk()
    with pytest.raises(UsageError, match=said):
        attach(server, server.setup_webserver(), SETTINGS, adapter=adapter)


def test_only_a_cookie_signed_with_its_own_name_carries_a_session() -> None:
    scope = with_session_id({"headers": [(b"cookie", b"other=1")]}, COOKIE, "session-1")
    assert session_id_of(scope, COOKIE) == "session-1"
    [(_, cookies)] = scope["headers"]
    forged = {"headers": [(b"cookie", cookies[:-2])]}
    assert session_id_of(forged, COOKIE) is None


def test_a_cookie_that_gyms_servers_would_find_too_old_is_signed_anew_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as long_ago:
        long_ago.setattr(TimestampSigner, "get_timestamp", lambda signer: 1_000_000_000)
        old = with_session_id({"headers": []}, COOKIE, "session-1")
    assert session_id_of(old, COOKIE) == "session-1"
    [(_, cookies)] = renewed(old, COOKIE)["headers"]
    assert TimestampSigner(COOKIE).validate(cookies.removeprefix(f"{COOKIE}=".encode()), max_age=60)
    forged = {"headers": [(b"cookie", cookies[:-2])]}
    assert renewed(forged, COOKIE) == forged


def test_a_session_token_of_gym_names_the_attempt_too_and_stays_gyms() -> None:
    def carrying(token: str) -> dict[str, Any]:
        return {"headers": [(b"x-nemo-gym-session-token", token.encode())]}

    signer = URLSafeSerializer(COOKIE, salt="nemo-gym-mcp-session-token")
    tokens = McpTokens(Desk(), COOKIE)
    given = signer.dumps({"sid": "session-1", "tools": ["write"]})
    reply = dumps({"mcp": {"url_path": "/mcp", "headers": {"X-NeMo-Gym-Session-Token": given}}})
    assert tokens.named(carrying(given)) == ("session-1", None)
    fields = loads(tokens.bound(Answer(200, (), reply), EPISODE.next, typed=True).body)
    [(name, token)] = fields["resources_tools"]["headers"].items()
    assert (list(fields), name) == (["resources_tools"], "X-NeMo-Gym-Session-Token")
    assert signer.loads(token) == {"sid": "session-1", "tools": ["write"], "episode": "r-1-a1"}
    assert tokens.named(carrying(token)) == ("session-1", EPISODE.next)
    assert tokens.named(carrying(token[:-1])) == (None, None)


def test_a_token_can_be_made_anew_where_every_session_is_allowed_the_same_tools() -> None:
    narrowing = type("Narrowing", (Desk,), {"mcp_allowed_tools_for_session": lambda self, body: ["write"]})
    assert McpTokens(Desk(), COOKIE).renewable
    assert not McpTokens(narrowing(), COOKIE).renewable


def test_a_hand_comes_back_with_the_generator_that_deals_the_next_card() -> None:
    dealing = random.Random(7)
    server = SimpleNamespace(session_state={"s": {"player": ["A"], "dealer": ["9", "9"], "rng": dealing}})
    restored = SimpleNamespace(session_state={})

    async def move() -> None:
        state = loads(dumps(await Blackjack("table", server).export_session_state("s")))
        adapter = Blackjack("table", restored)
        await adapter.validate_session_state("s", state)
        await adapter.restore_session_state("s", state)

    asyncio.run(move())
    table = restored.session_state["s"]
    assert (table["player"], table["dealer"]) == (["A"], ["9", "9"])
    assert [table["rng"].random() for _ in range(3)] == [dealing.random() for _ in range(3)]


@pytest.mark.parametrize(
    "state", [None, {}, {"player": [], "dealer": []}, {"player": [1], "dealer": [], "rng": [3, [], None]}]
)
def test_a_hand_that_cannot_be_restored_is_refused(state: Any) -> None:
    with pytest.raises(ValueError):
        asyncio.run(Blackjack("table", SimpleNamespace(session_state={})).validate_session_state("s", state))


def test_the_adapter_of_the_guide_captures_a_session_and_says_what_is_lost() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "nemo-gym.md").read_text()
    example = next(block for block in guide.split("```python\n")[1:] if "class YourAdapter" in block).partition("```")[
        0
    ]
    module = ModuleType("your_adapter")
    exec(compile(example, "docs/nemo-gym.md", "exec"), module.__dict__)
    made: Any = module.__dict__["YourAdapter"]
    played, empty = SimpleNamespace(boards={"s": ["x"]}), SimpleNamespace(boards={})

    async def move() -> None:
        await made("games", empty).restore_session_state("s", await made("games", played).export_session_state("s"))
        assert empty.boards == {"s": ["x"]}
        await made("games", played).retire_session_state("s")
        with pytest.raises(SessionLost):
            await made("games", played).export_session_state("s")

    asyncio.run(move())


def test_a_counter_that_is_gone_is_lost_and_one_that_is_no_number_is_refused() -> None:
    adapter = Counters("counters", SimpleNamespace(session_id_to_counter={"s": 3}))
    assert asyncio.run(adapter.export_session_state("s")) == 3
    with pytest.raises(SessionLost):
        asyncio.run(adapter.export_session_state("other"))
    with pytest.raises(ValueError):
        asyncio.run(adapter.validate_session_state("s", True))


def test_an_episode_held_inside_a_handler_is_a_restart_runs_once_at_a_time_and_stops_when_retired() -> None:
    async def scene() -> None:
        role = OwnerRole("agent", "agent", Marks())
        running = asyncio.create_task(role.own(EPISODE, asyncio.Event().wait))
        await asyncio.sleep(0)
        with pytest.raises(CheckpointConflict):
            await role.own(EPISODE, asyncio.Event().wait)
        role.close()
        assert (role.report().ready, role.report().restarts) == (True, ["r-1"])
        role.open()
        role.marks.raise_mark(EPISODE)
        await role.retire(EPISODE)
        with pytest.raises(StaleAttempt):
            await running
        with pytest.raises(StaleAttempt):
            await role.own(EPISODE, asyncio.Event().wait)
        assert not role.live()

    asyncio.run(scene())


class SimpleResponsesAPIAgent(SimpleResourcesServer):
    """In the place of Gym's base class of agents."""


class Helper(SimpleResponsesAPIAgent):
    def __init__(self) -> None:
        super().__init__()
        self.open: set[str] = set()

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/agent_sessions")
        async def begin(request: Request) -> dict[str, str]:
            self.open.add((await request.json())["agent_session_id"])
            return {}

        @app.post("/v1/agent_sessions/close")
        async def end(request: Request) -> dict[str, str]:
            self.open.discard((await request.json())["agent_session_id"])
            return {}

        return app


def test_an_agent_session_of_a_retired_attempt_is_closed_by_the_servers_own_route() -> None:
    server = Helper()
    reference = {"rollout_id": "r-1", "attempt": 0}

    async def talk() -> list[set[str]]:
        app = server.setup_webserver()
        attach(server, app, SETTINGS)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agent") as client:
            seeded = await client.post("/v1/agent_sessions", json={"agent_session_id": "s-1", "episode_id": reference})
            assert seeded.headers["x-ng-checkpoint-restart"] == "1"
            seen = [set(server.open)]
            retire = {"checkpoint_id": "ckpt-1", "deadline_ts": time.time() + 10, "episode_ids": [reference]}
            bearer = {"authorization": "Bearer token"}
            retired = await client.post("/ng-control/v1/checkpoint/retire", json=retire, headers=bearer)
            assert retired.status_code == 200, retired.text
            seen.append(set(server.open))
            late = await client.post("/v1/agent_sessions", json={"agent_session_id": "s-2", "episode_id": reference})
            assert late.json()["error"]["code"] == "stale_attempt"
            return seen

    assert asyncio.run(talk()) == [{"s-1"}, set()]
