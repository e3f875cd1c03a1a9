"""The inference worker: an OpenAI-compatible server around an engine (`/v1/responses`, `/v1/chat/completions`).

It takes no part in checkpoints itself. A policy model server names its calls by header; where a control token is set,
generation cuts are served for those, and a call that brings a prefix goes on from it.
"""

import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import GymckptError, Unauthorized, UsageError
from gymckpt.identity import EpisodeId
from gymckpt.ports import Clock, FileSystem, Offload, SystemClock, ThreadOffload
from gymckpt.roles.staging import StagingStore
from gymckpt.servers.callers import unless_gone
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.scratch import Scratch
from gymckpt.servers.worker_cuts import WorkerCuts
from gymckpt.servers.worker_engine import Engine, TurnRequest
from gymckpt.servers.worker_format import reply
from gymckpt.servers.worker_generation import Generations
from gymckpt.servers.worker_scripted import ScriptedEngine, ScriptedOptions
from gymckpt.settings import CheckpointSettings
from gymckpt.storage.files import LocalFileSystem
from gymckpt.wire import responses
from gymckpt.wire.cuts import (
    CUT_PATH,
    HEADER_CAPTURE_KEY,
    HEADER_CONTINUED,
    HEADER_MODEL_CALL,
    HEADER_POLICY_VERSION,
    PREFIX_FIELD,
    STAGED_PATH,
    CutRequest,
    PrefixClaim,
    StagedRequest,
)
from gymckpt.wire.responses import Route

MAX_BODY_BYTES = 256 << 20
OFFLOADED_BYTES = 256 << 10

M = TypeVar("M", bound=BaseModel)


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """The scripted worker, as a deployment names it."""
    try:
        settings = ScriptedOptions.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"options of {instance}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    clock = SystemClock()
    engine = ScriptedEngine(settings, clock)
    return worker_app(instance, engine, checkpoint, clock=clock, staging_dir=settings.staging_dir)


def worker_app(
    instance: str,
    engine: Engine,
    checkpoint: CheckpointSettings,
    *,
    clock: Clock,
    fs: FileSystem | None = None,
    offload: Offload | None = None,
    staging_dir: Path | None = None,
) -> FastAPI:
    """An app that serves `engine`. Without a control token it serves no generation cuts."""
    worker = _Worker(engine, clock, offload or ThreadOffload())
    token = checkpoint.control_auth_token if checkpoint.enabled else None
    if token is not None:
        worker.enable_cuts(fs or LocalFileSystem(), staging_dir)
    app = FastAPI(title=instance, openapi_url=None, lifespan=worker.lifespan)
    app.add_api_route("/", worker.liveness, methods=["GET"])
    app.add_api_route("/stats", worker.stats, methods=["GET"])
    app.add_api_route("/v1/models", worker.models, methods=["GET"])
    app.add_api_route(responses.RESPONSES, worker.create_response, methods=["POST"], response_model=None)
    app.add_api_route(responses.CHAT, worker.create_chat_completion, methods=["POST"], response_model=None)
    if token is not None:
        control = _Control(worker, token.get_secret_value())
        app.add_api_route(CUT_PATH, control.cut, methods=["POST"], response_model=None)
        app.add_api_route(STAGED_PATH, control.staged, methods=["POST"], response_model=None)
    app.add_exception_handler(GymckptError, _refuse)
    return app


class _Worker:
    """The data plane."""

    def __init__(self, engine: Engine, clock: Clock, offload: Offload) -> None:
        self.cuts: WorkerCuts | None = None
        self.offload = offload
        self._engine = engine
        self._clock = clock
        self._generations = Generations(engine, clock)
        self._store: StagingStore | None = None
        self._scratch: Scratch | None = None

    def enable_cuts(self, fs: FileSystem, directory: Path | None) -> None:
        """Serve generation cuts, staged in `directory` or in one for the life of the process."""
        if directory is None:
            self._scratch = Scratch("staging")
            directory = self._scratch.path / "cuts"
        self._store = StagingStore(fs, self.offload, directory, self._clock)
        self.cuts = WorkerCuts(self._engine, self._generations, self._store, self.offload)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Find what was staged before; remove the temporary directory afterwards."""
        if self._store is not None:
            await self.offload.run(self._store.open)
        yield
        if self._scratch is not None:
            await self.offload.run(self._scratch.remove)

    async def create_response(self, request: Request) -> Response:
        return await self._answer(responses.RESPONSES, request)

    async def create_chat_completion(self, request: Request) -> Response:
        return await self._answer(responses.CHAT, request)

    async def liveness(self) -> dict[str, str]:
        return {"status": "ok"}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": self._engine.model, "object": "model", "owned_by": "gymckpt"}]}

    async def stats(self) -> dict[str, Any]:
        """What was generated since the start, and how far each named call is."""
        generations = self._generations
        return {
            "calls": generations.calls,
            "generated_tokens": generations.generated_tokens,
            "continued_tokens": generations.continued_tokens,
            "active": {active.model_call_id: len(active.tokens) for active in generations.active},
        }

    async def _answer(self, route: Route, request: Request) -> Response:
        body = await _json_object(request, self.offload)
        prefix = body.pop(PREFIX_FIELD, None)
        turn_request = TurnRequest(
            route, body, responses.conversation(route, body), responses.tools(body), responses.seed(body)
        )
        call_id, key = (request.headers.get(name, "") for name in (HEADER_MODEL_CALL, HEADER_CAPTURE_KEY))
        generation = await self._generations.begin(turn_request, call_id, key)
        if prefix is not None:
            if self.cuts is None or not call_id or not key:
                raise UsageError(f"{PREFIX_FIELD} needs a worker with cuts enabled, and a call that is named by header")
            await self.cuts.continued(_checked(PrefixClaim, prefix), EpisodeId.parse(key), generation)
        made = await unless_gone(request, self._generations.run(generation))
        whole = reply(route, body, made, model=self._engine.model, created_at=int(self._clock.time()))
        headers = {HEADER_POLICY_VERSION: self._engine.policy_version}
        if generation.continued:
            headers[HEADER_CONTINUED] = str(generation.continued)
        return Response(jsoncodec.dumps(whole), headers=headers, media_type="application/json")


class _Control:
    """The control plane of a worker."""

    def __init__(self, worker: _Worker, token: str) -> None:
        assert worker.cuts is not None
        self._cuts = worker.cuts
        self._offload = worker.offload
        self._token = token.encode()

    async def cut(self, request: Request) -> Response:
        """`POST /ng-control/v1/generation-cut`."""
        receipt = await self._cuts.cut(await self._read(request, CutRequest))
        data = await self._offload.run(lambda: receipt.model_dump_json(exclude_none=True))
        return Response(data, media_type="application/json")

    async def staged(self, request: Request) -> Response:
        """`POST /ng-control/v1/staged-prefixes`: the prefixes with their tokens, null for what is not staged."""
        wanted = await self._read(request, StagedRequest)
        found = await self._cuts.staged(wanted.staging_keys)
        data = await self._offload.run(lambda: jsoncodec.dumps({"prefixes": [c and c.model_dump() for c in found]}))
        return Response(data, media_type="application/json")

    async def _read(self, request: Request, message: type[M]) -> M:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(token.strip().encode("utf-8", "surrogateescape"), self._token)
        if not same or scheme.lower() != "bearer":
            raise Unauthorized("generation cuts need the control plane's bearer token")
        return _checked(message, await _json_object(request, self._offload))


def _checked(message: type[M], body: Any) -> M:
    try:
        return message.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise UsageError(f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg'][:300]}") from error


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, GymckptError)
    return JSONResponse({"error": {"code": error.code, "detail": error.detail}}, error.http_status)


async def _json_object(request: Request, offload: Offload) -> dict[str, Any]:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise UsageError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        big = len(data) > OFFLOADED_BYTES
        body = await offload.run(lambda: jsoncodec.loads(data)) if big else jsoncodec.loads(data)
    except ValueError as error:
        raise UsageError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise UsageError("the body is not a JSON object")
    return body
