"""Rules of the llama engine. Needs the extra `gymckpt[llama]`; run by its own command: `pytest -m llama`."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.worker_llama import build
from gymckpt.wire.cuts import CUT_PATH, STAGED_PATH, CutRequest, Ticket
from tests.servers.policy import ENABLED, TOKEN

pytestmark = [pytest.mark.llama, pytest.mark.timeout(600)]
QUESTION = {"input": [{"role": "user", "content": "Tell me about the sea, at length."}], "max_output_tokens": 60}
BEARER = {"authorization": f"Bearer {TOKEN}"}


def names(call: str, key: str) -> dict[str, str]:
    return {"x-ng-model-call": call, "x-ng-capture-key": key}


async def cut_of_a_call_under_way(client: httpx.AsyncClient) -> dict[str, Any]:
    """The prefix of a call that is cut once it has some tokens, as the worker staged it."""
    asking = asyncio.create_task(client.post("/v1/responses", json=QUESTION, headers=names("one", "r-1")))
    ticket = Ticket(ticket_id="t", rollout_id="r-1", attempt=0, model_call_id="one", admitted_at=1.0)
    request = CutRequest.of("ckpt-000001-00000000", "model", [ticket]).model_dump()
    for number in range(10_000):
        active = (await client.get("/stats")).json()["active"]
        if active.get("one", 0) >= 8:
            break
        request = CutRequest.of(f"ckpt-{number:06d}-00000000", "model", [ticket]).model_dump()
        await asyncio.sleep(0.01)
    receipt = (await client.post(CUT_PATH, json=request, headers=BEARER)).json()
    (prefix,) = receipt["prefixes"]
    assert prefix["disposition"] == "durable_prefix", prefix
    staged = await client.post(STAGED_PATH, json={"staging_keys": prefix["staging_keys"]}, headers=BEARER)
    asking.cancel()
    await asyncio.wait([asking])
    claim: dict[str, Any] = staged.json()["prefixes"][0]
    return claim


def test_a_continued_answer_begins_with_the_exact_staged_tokens_and_goes_on_from_them(tmp_path: Path) -> None:
    async def work() -> None:
        app = build("llama", {"staging_dir": tmp_path, "context_tokens": 512}, ENABLED, Neighbours({}))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://w", timeout=600) as client,
        ):
            claim = await cut_of_a_call_under_way(client)
            before = (await client.get("/stats")).json()["generated_tokens"]
            body = {**QUESTION, "generation_prefix": claim}
            got = (await client.post("/v1/responses", json=body, headers=names("two", "r-1-a1"))).json()
            count = claim["prefix_token_count"]
            assert got["token_ids"][:count] == claim["token_ids"]
            assert got["log_probs"][:count] == claim["log_probs"]
            assert len(got["token_ids"]) > count
            after = (await client.get("/stats")).json()["generated_tokens"]
            assert after - before == len(got["token_ids"]) - count
            assert got["output"][0]["content"][0]["text"]
            wrong = {**QUESTION, "generation_prefix": {**claim, "policy_version": "another"}}
            refused = await client.post("/v1/responses", json=wrong, headers=names("three", "r-1-a1"))
            assert refused.json()["error"]["detail"].startswith("policy_version: ")

    asyncio.run(work())


def test_sampling_depends_on_request_and_position_alone() -> None:
    async def work() -> None:
        app = build("llama", {"context_tokens": 512}, ENABLED, Neighbours({}))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://w", timeout=600) as client,
        ):
            warm = {**QUESTION, "temperature": 1.0, "max_output_tokens": 12, "metadata": {"seed": "1"}}
            first, second = [(await client.post("/v1/responses", json=warm)).json() for _ in range(2)]
            other = (await client.post("/v1/responses", json={**warm, "metadata": {"seed": "2"}})).json()
            assert first["token_ids"] == second["token_ids"] != other["token_ids"]
            assert all(logprob <= 0 for logprob in first["log_probs"])

    asyncio.run(work())
