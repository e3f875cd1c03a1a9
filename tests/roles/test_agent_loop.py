"""The loop of Simple Agent: when it ends, what the model sees of its tools."""

from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from gymckpt import jsoncodec
from tests.roles.town import Town, finished
from tests.simulation.clock import run_virtual


def _script(town: Town, *replies: dict[str, Any]) -> list[dict[str, Any]]:
    """A model that gives `replies` one after the other; its requests are returned."""
    asked: list[dict[str, Any]] = []
    app = FastAPI()

    async def respond(request: Request) -> Response:
        asked.append(jsoncodec.loads(await request.body()))
        return Response(jsoncodec.dumps(replies[len(asked) - 1]), media_type="application/json")

    app.add_api_route("/ng-rollout/{key}/v1/responses", respond, methods=["POST"])
    town.network.serve(town.servers["model"], app)
    return asked


def _calls(*calls: tuple[str, str]) -> dict[str, Any]:
    output = [
        {"type": "function_call", "call_id": f"c{i}", "name": n, "arguments": a} for i, (n, a) in enumerate(calls)
    ]
    return {"id": "x", "output": output, "usage": {"input_tokens": 2, "details": {"cached": 1}}}


ANSWER: dict[str, Any] = {
    "id": "last",
    "output": [{"type": "message", "role": "assistant", "content": []}],
    "usage": {"input_tokens": 3, "details": {"cached": 2}},
    "model": "m",
}


def test_the_reply_is_the_last_response_with_everything_that_was_said_and_all_tokens(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        asked = _script(town, _calls(("add", '{"amount":2}'), ("add", '{"amount":1}')), ANSWER)
        response = (await finished(town.run()))["result"]["response"]
        assert list(response) == list(ANSWER), "key order is kept"
        assert response["usage"] == {"input_tokens": 5, "details": {"cached": 3}}
        assert [item.get("output") for item in response["output"]] == [
            None,
            None,
            '{"total":2}',
            '{"total":3}',
            None,
        ]
        assert asked[0]["input"] == [{"role": "user", "content": "add up"}]
        assert asked[1]["input"][1:] == response["output"][:4]

    run_virtual(main())


@pytest.mark.parametrize(
    ("name", "arguments", "shown"),
    [
        ("verify", "{}", "there is no tool"),
        ("close_session", "{}", "there is no tool"),
        ("../add", "{}", "there is no tool"),
        ("ng-control/v1/checkpoint/resume", "{}", "there is no tool"),
        ("add", "{", "no JSON"),
        ("add", "[1]", "not a JSON object"),
        ("add", '{"wrong":1}', "amount"),
        ("missing", "{}", "Not Found"),
    ],
)
def test_a_tool_error_is_shown_to_the_model(tmp_path: Path, name: str, arguments: str, shown: str) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        asked = _script(town, _calls((name, arguments)), ANSWER)
        await finished(town.run())
        assert shown in asked[1]["input"][-1]["output"]
        assert town.counter.verified == 1, "only the environment verifies"

    run_virtual(main())


def test_the_loop_ends_at_its_step_limit_after_the_tools_of_the_last_step(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path, agent={"max_steps": 2})
        reply = await finished(town.run(wanted=2))
        assert reply["result"]["reward"] == 1.0
        assert len(town.calls) == 2

    run_virtual(main())


def test_a_response_cut_off_at_its_token_limit_ends_the_loop_without_its_tools(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        cut = {**_calls(("add", '{"amount":1}')), "incomplete_details": {"reason": "max_output_tokens"}}
        _script(town, cut)
        await finished(town.run())
        assert town.audit == []

    run_virtual(main())


def test_reasoning_alone_is_no_answer_and_an_empty_output_is_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        thinking = {"id": "t", "output": [{"type": "reasoning", "summary": []}]}
        asked = _script(town, thinking, {"id": "e", "output": []})
        response = (await finished(town.run()))["result"]["response"]
        assert len(asked) == 2
        assert response["id"] == "e"

    run_virtual(main())


def test_a_reply_without_an_output_list_fails_the_episode(tmp_path: Path) -> None:
    async def main() -> None:
        town = Town(tmp_path)
        _script(town, {"id": "x", "output": "text"})
        failure = (await finished(town.run()))["failure"]
        assert (failure["stage"], failure["failure_kind"]) == ("agent", "bad_reply")

    run_virtual(main())
