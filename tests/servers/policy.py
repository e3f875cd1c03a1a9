"""A policy model server over a worker whose answers the test lets go, both in this process, with real files."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import SecretStr

from gymckpt import jsoncodec
from gymckpt.errors import DeadlinePassed, NotSent, ServerError
from gymckpt.ports import Deadline, Reply, ServerRef
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.model import ModelOptions, model_app
from gymckpt.settings import CheckpointSettings
from gymckpt.wire.control import PREFIX

TOKEN = "control-token"
ENABLED = CheckpointSettings(enabled=True, control_auth_token=SecretStr(TOKEN))


class AppTransport:
    """`ports.Transport` into apps of this process, by URL; an absent one refuses connections."""

    def __init__(self, apps: Mapping[str, FastAPI]) -> None:
        self.apps = dict(apps)
        self.refused = asyncio.Event()

    async def call(
        self,
        server: ServerRef,
        method: str,
        path: str,
        body: Any = None,
        *,
        deadline: Deadline,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
    ) -> Reply:
        """See `ports.Transport.call`."""
        app = self.apps.get(server.url)
        if app is None:
            self.refused.set()
            raise NotSent(f"{server.url} refused the connection")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=server.url) as client:
            try:
                async with asyncio.timeout(deadline.remaining_s):
                    content = body if isinstance(body, bytes) or body is None else jsoncodec.dumps(body)
                    got = await client.request(method, path, content=content, headers=dict(headers or {}))
            except TimeoutError:
                raise DeadlinePassed(f"{server.url}{path}") from None
            except ConnectionResetError as error:
                raise ServerError(f"{server.url}{path}: the connection broke") from error
        return Reply(got.status_code, dict(got.headers.items()), got.content)


class HeldWorker:
    """A backend that says `echo: <last text>` as soon as the test opens `gate`."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.healthy = asyncio.Event()
        self.healthy.set()
        self.checked = asyncio.Event()
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.cancelled = 0
        self.troubles: list[int | str] = []
        """What befalls the next calls: a status, or `broken` for a connection that breaks in the middle."""
        self.retry_after: str | None = None
        self.arrived = asyncio.Condition()
        self.app = FastAPI()
        self.app.add_api_route("/v1/responses", self._answer, methods=["POST"], response_model=None)
        self.app.add_api_route("/v1/models", self._models, methods=["GET"], response_model=None)
        self.app.add_api_route("/v1/chat/completions", self._answer_chat, methods=["POST"], response_model=None)

    async def _models(self) -> JSONResponse:
        self.checked.set()
        await self.healthy.wait()
        return JSONResponse({"data": []})

    async def wait_for_calls(self, count: int) -> None:
        """Return once that many calls have arrived since the beginning."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.seen) >= count)

    async def _take(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        async with self.arrived:
            self.seen.append(body)
            self.headers.append(dict(request.headers))
            self.arrived.notify_all()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return body

    async def _answer(self, request: Request) -> JSONResponse:
        body = await self._take(request)
        if self.troubles:
            trouble = self.troubles.pop(0)
            if isinstance(trouble, str):
                raise ConnectionResetError
            headers = {"retry-after": self.retry_after} if self.retry_after else {}
            return JSONResponse({"error": {"message": "away"}}, trouble, headers)
        if body.get("fail"):
            return JSONResponse({"error": {"message": "no"}}, body["fail"])
        number = len(self.seen)
        text = body["input"] if isinstance(body["input"], str) else body["input"][-1]["content"]
        content = [{"type": "output_text", "text": f"echo: {text}" * body.get("times", 1), "annotations": []}]
        message = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": content}
        return JSONResponse(
            {
                "id": f"resp_{number}",
                "object": "response",
                "status": "completed",
                "output": [message],
                "usage": {"input_tokens": 3, "output_tokens": 2},
            }
        )

    async def _answer_chat(self, request: Request) -> JSONResponse:
        body = await self._take(request)
        text = f"echo: {body['messages'][-1]['content']}" * body.get("times", 1)
        message = {"role": "assistant", "content": text}
        return JSONResponse({"id": "chat", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


class Policy:
    """The server, its control plane, and callers of it."""

    def __init__(self, app: FastAPI, worker: HeldWorker, transport: AppTransport, directory: Path) -> None:
        self.app = app
        self.worker = worker
        self.transport = transport
        self._directory = directory
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://policy")

    async def ask(self, key: str | None, body: dict[str, Any] | str, route: str = "/v1/responses") -> httpx.Response:
        """One call, of a rollout if `key` names an episode."""
        prefix = f"/ng-rollout/{key}" if key else ""
        sent = {"input": body} if isinstance(body, str) else body
        return await self._client.post(prefix + route, json=sent)

    def asking(self, key: str | None, body: dict[str, Any] | str) -> "asyncio.Task[httpx.Response]":
        """The same, not waited for."""
        return asyncio.create_task(self.ask(key, body))

    async def control(self, name: str, checkpoint: str, within_s: float = 5.0, **fields: Any) -> dict[str, Any]:
        """A control call that must succeed."""
        reply = await self.try_control(name, checkpoint, within_s, **fields)
        assert reply.status_code == 200, reply.text
        value: dict[str, Any] = reply.json()
        return value

    async def try_control(self, name: str, checkpoint: str, within_s: float = 5.0, **fields: Any) -> httpx.Response:
        """A control call, however it goes."""
        body = {"checkpoint_id": checkpoint, "deadline_ts": time.time() + within_s, **fields}
        return await self._client.post(f"{PREFIX}/{name}", json=body, headers={"authorization": f"Bearer {TOKEN}"})

    async def status(self) -> dict[str, Any]:
        """`GET /status`."""
        reply = await self._client.get(f"{PREFIX}/status", headers={"authorization": f"Bearer {TOKEN}"})
        value: dict[str, Any] = reply.json()
        return value

    async def checkpoint(self, checkpoint: str, *keys: str, resume: bool = True) -> dict[str, Any]:
        """Prepare and commit, and resume unless told not to; the commit's reply."""
        prepared = await self.control("prepare", checkpoint)
        assert prepared["phase"] == "prepared", prepared
        reply = await self.control(
            "commit", checkpoint, episode_ids=refs(*keys), checkpoint_dir=self.directory(checkpoint)
        )
        if resume:
            await self.control("resume", checkpoint)
        return reply

    async def restore(self, source: str, checkpoint: str, *keys: str) -> dict[str, Any]:
        """Restore these episodes from `source`, and resume."""
        reply = await self.control(
            "restore", checkpoint, episode_ids=refs(*keys), checkpoint_dir=self.directory(source)
        )
        await self.control("resume", checkpoint)
        return reply

    def directory(self, checkpoint: str) -> str:
        """Where a checkpoint lies."""
        path = self._directory / "checkpoints" / checkpoint
        path.mkdir(parents=True, exist_ok=True)
        return str(path)


def refs(*keys: str) -> list[dict[str, Any]]:
    """Capture keys as the control plane takes them."""
    found = []
    for key in keys:
        rollout_id, _, attempt = key.partition("-a")
        found.append({"rollout_id": rollout_id, "attempt": int(attempt or 0)})
    return found


@asynccontextmanager
async def policy(
    directory: Path,
    worker: HeldWorker | None = None,
    *,
    checkpoint: CheckpointSettings = ENABLED,
    apps: Mapping[str, FastAPI] | None = None,
    **options: Any,
) -> AsyncIterator[Policy]:
    """A server that serves until the end of the `async with`; its ledger outlives it in `directory`."""
    worker = worker or HeldWorker()
    transport = AppTransport({"http://worker": worker.app, **(apps or {})})
    given = {
        "backend_urls": ["http://worker/v1"],
        "ledger_dir": directory / "ledger",
        "generation_cuts": True,
        **options,
    }
    app = model_app("policy_model", ModelOptions.model_validate(given), checkpoint, Neighbours({}), transport=transport)
    async with app.router.lifespan_context(app):
        yield Policy(app, worker, transport, directory)
