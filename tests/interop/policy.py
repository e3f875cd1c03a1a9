"""The model behind NeMo Gym's `openai_model` in these tests: it does what the row's text asks, one call at a time.

A row may carry `metadata.answer`: then that is what it says. A prompt without either is a judge's: it gets the verdict
of the deployment's options.
"""

import asyncio
import json
import re
import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from gymckpt.servers.deployment import Neighbours
from gymckpt.settings import CheckpointSettings

Item = dict[str, Any]


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """See `servers.registry.Builder`. Options: `latency_s`, `verdict`."""
    app = FastAPI()
    latency_s = float(options.get("latency_s", 0.0))
    verdict = str(options.get("verdict", "no verdict was asked for in this test"))

    @app.get("/")
    async def alive() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/responses")
    async def respond(request: Request) -> JSONResponse:
        body = await request.json()
        await asyncio.sleep(latency_s)
        return JSONResponse(_response(body, _next(body, verdict)))

    return app


def _next(body: Item, verdict: str) -> Item:
    answer = (body.get("metadata") or {}).get("answer")
    given = body["input"] if isinstance(body["input"], list) else []
    asked = _asked(given)
    if answer is not None:
        return _message(answer)
    if not any(tool.get("name") == "increment_counter" for tool in body.get("tools") or ()):
        return _message(verdict)
    done = sum(1 for item in given if item.get("type") == "function_call_output")
    if done < len(asked):
        return _call("increment_counter", {"count": asked[done]}, done)
    if done == len(asked):
        return _call("get_counter_value", {}, done)
    return _message(f"the count is {given[-1]['output']}")


def _asked(given: list[Item]) -> list[int]:
    text = next((str(item["content"]) for item in given if item.get("role") == "user"), "")
    return [int(number) for number in re.findall(r"add (\d+)", text)]


def _call(name: str, arguments: Item, index: int) -> Item:
    return {
        "type": "function_call",
        "id": f"fc_{uuid.uuid4().hex[:8]}",
        "call_id": f"call_{index}",
        "name": name,
        "arguments": json.dumps(arguments),
        "status": "completed",
    }


def _message(text: str) -> Item:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    message_id = f"msg_{uuid.uuid4().hex[:8]}"
    return {"type": "message", "id": message_id, "role": "assistant", "status": "completed", "content": content}


def _response(body: Item, item: Item) -> Item:
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "created_at": 0,
        "object": "response",
        "model": body.get("model") or "policy",
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "metadata": body.get("metadata") or {},
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "status": "completed",
        "usage": {
            "input_tokens": 10,
            "output_tokens": 5,
            "total_tokens": 15,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }
