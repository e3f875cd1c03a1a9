"""The inference worker: an OpenAI-compatible server around an engine (`/v1/responses`, `/v1/chat/completions`).

It takes no part in checkpoints itself. A policy model server names its calls by header, so that a generation cut can
ask for the tokens of one of them.
"""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import GymckptError, UsageError
from gymckpt.ports import Clock, SystemClock
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.worker_engine import Engine, TurnRequest
from gymckpt.servers.worker_format import reply
from gymckpt.servers.worker_generation import Generations
from gymckpt.servers.worker_scripted import ScriptedEngine, ScriptedOptions
from gymckpt.settings import CheckpointSettings
from gymckpt.wire import responses
from gymckpt.wire.cuts import HEADER_MODEL_CALL, HEADER_POLICY_VERSION
from gymckpt.wire.responses import Route

MAX_BODY_BYTES = 256 << 20


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """The scripted worker, as a deployment names it."""
    try:
        settings = ScriptedOptions.model_validate(options)
    except ValidationError as error:
        raise UsageError(f"options of {instance}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
    clock = SystemClock()
    return worker_app(instance, ScriptedEngine(settings, clock), clock=clock)


def worker_app(instance: str, engine: Engine, *, clock: Clock) -> FastAPI:
    """An app that serves `engine`."""
    app = FastAPI(title=instance, openapi_url=None)
    generations = Generations(engine, clock)

    async def answer(route: Route, request: Request) -> Response:
        body = await _json_object(request)
        turn_request = TurnRequest(
            route, body, responses.conversation(route, body), responses.tools(body), responses.seed(body)
        )
        generation = await generations.begin(turn_request, request.headers.get(HEADER_MODEL_CALL, ""))
        made = await generations.run(generation)
        whole = reply(route, body, made, model=engine.model, created_at=int(clock.time()))
        headers = {HEADER_POLICY_VERSION: engine.policy_version}
        return Response(jsoncodec.dumps(whole), headers=headers, media_type="application/json")

    @app.post(responses.RESPONSES)
    async def create_response(request: Request) -> Response:
        return await answer(responses.RESPONSES, request)

    @app.post(responses.CHAT)
    async def create_chat_completion(request: Request) -> Response:
        return await answer(responses.CHAT, request)

    @app.get("/")
    async def liveness() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": engine.model, "object": "model", "owned_by": "gymckpt"}]}

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return {
            "calls": generations.calls,
            "generated_tokens": generations.generated_tokens,
            "continued_tokens": generations.continued_tokens,
            "active": {g.model_call_id: len(g.tokens) for g in generations.active},
        }

    @app.exception_handler(GymckptError)
    async def refuse(request: Request, error: GymckptError) -> Response:
        return JSONResponse({"error": {"code": error.code, "detail": error.detail}}, error.http_status)

    return app


async def _json_object(request: Request) -> dict[str, Any]:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise UsageError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        body = jsoncodec.loads(bytes(data))
    except ValueError as error:
        raise UsageError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise UsageError("the body is not a JSON object")
    return body
