"""The scripted worker: deterministic in what it says, honest in what it counts."""

import asyncio
from typing import Any

import httpx

from gymckpt.ports import SystemClock
from gymckpt.servers import worker_tokens
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.worker import build, worker_app
from gymckpt.servers.worker_scripted import ScriptedEngine, ScriptedOptions
from gymckpt.settings import CheckpointSettings

QUESTION = {"input": [{"role": "user", "content": "What is 6 x 7?"}], "metadata": {"seed": "3"}}
VOLATILE = ("id", "created_at", "created")


def ask(*requests: tuple[str, dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        app = build("worker", options, CheckpointSettings(), Neighbours({}))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
            replies = await asyncio.gather(*(client.post(route, json=body) for route, body in requests))
            assert [reply.status_code for reply in replies] == [200] * len(replies)
            return [reply.json() for reply in replies]

    return asyncio.run(run())


def test_the_same_conversation_gets_the_same_tokens_and_log_probabilities_under_fresh_ids() -> None:
    first, second = ask(("/v1/responses", QUESTION), ("/v1/responses", QUESTION), thought_tokens=(50, 80))
    assert first["id"] != second["id"]
    assert first["output"][0]["id"] != second["output"][0]["id"]
    assert first["token_ids"] == second["token_ids"]
    assert first["log_probs"] == second["log_probs"]
    assert all(-1 <= logprob <= 0 for logprob in first["log_probs"])
    assert first["usage"]["output_tokens"] == len(first["token_ids"]) >= 50


def test_another_seed_or_another_question_gets_other_tokens() -> None:
    other_seed = {**QUESTION, "metadata": {"seed": "4"}}
    other_text = {**QUESTION, "input": "What is 6 x 8?"}
    replies = ask(*(("/v1/responses", body) for body in (QUESTION, other_seed, other_text)), thought_tokens=(50, 80))
    assert len({tuple(reply["token_ids"]) for reply in replies}) == 3


def test_ids_in_the_conversation_change_nothing() -> None:
    def turn(suffix: str) -> dict[str, Any]:
        call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": f"call_{suffix}"}
        output = {"type": "function_call_output", "call_id": f"call_{suffix}", "output": "nothing"}
        return {"input": [{"role": "user", "content": "Look."}, {**call, "id": f"fc_{suffix}"}, output]}

    first, second = ask(("/v1/responses", turn("a")), ("/v1/responses", turn("b")), thought_tokens=(20, 20))
    assert first["token_ids"] == second["token_ids"]


def test_both_apis_say_the_same() -> None:
    chat = {"messages": [{"role": "user", "content": "What is 6 x 7?"}]}
    responses, completion = ask(("/v1/responses", {"input": "What is 6 x 7?"}), ("/v1/chat/completions", chat))
    message = completion["choices"][0]["message"]
    assert responses["output"][-1]["content"][0]["text"] == message["content"]
    assert completion["choices"][0]["finish_reason"] == "stop"


def test_an_answer_beyond_its_limit_is_incomplete_and_exactly_that_long() -> None:
    (reply,) = ask(("/v1/responses", {**QUESTION, "max_output_tokens": 7}), thought_tokens=(50, 50))
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert len(reply["token_ids"]) == 7


def test_what_trainers_read_stands_on_the_last_item_when_asked_for() -> None:
    (reply,) = ask(("/v1/responses", {**QUESTION, "return_token_ids": True}))
    assert reply["output"][-1]["generation_token_ids"] == reply["token_ids"]
    assert len(reply["output"][-1]["prompt_token_ids"]) == reply["usage"]["input_tokens"]


def test_a_body_that_is_no_object_is_refused_by_name() -> None:
    async def run() -> None:
        engine = ScriptedEngine(ScriptedOptions(), SystemClock())
        transport = httpx.ASGITransport(worker_app("worker", engine, CheckpointSettings(), clock=SystemClock()))
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
            reply = await client.post("/v1/responses", content=b"[1]")
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "usage"

    asyncio.run(run())


def test_any_text_comes_back_from_its_tokens() -> None:
    for text in (
        "",
        "a",
        "plain words, and more",
        "tabs\t\n\n  end ",
        "žluťoučký kůň 🐎 漢字",
        "lone \ud800 surrogate",
    ):
        tokens = worker_tokens.encode(text)
        assert worker_tokens.decode(tokens) == text
        assert worker_tokens.count(text) == len(tokens)
        assert all(0 <= token < worker_tokens.VOCABULARY_SIZE for token in tokens)
