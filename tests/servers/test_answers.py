"""answer_match and judged: verdicts without a state."""

from typing import Any

import pytest
from fastapi import FastAPI, Request

from gymckpt import jsoncodec
from gymckpt.ports import ServerRef
from gymckpt.servers.resources.answers import AnswerMatch, extract, same
from gymckpt.servers.resources.judged import Judged, JudgedOptions
from gymckpt.servers.resources.texts import boxed, last_text
from gymckpt.tasksets import task_rows
from gymckpt.tasksets.policy import decide
from tests.servers.resources_desk import OFF, Desk, code, value
from tests.servers.worked import Worked
from tests.simulation.clock import VirtualClock, run_virtual
from tests.simulation.transport import MemoryNetwork


@pytest.mark.parametrize(
    ("kind", "text", "expected", "right"),
    [
        ("exact", "  Kettle \n", "kettle", True),
        ("exact", "the kettle", "kettle", False),
        ("boxed", "so \\boxed{1,024}", "1024", True),
        ("boxed", "\\boxed{1} no, \\boxed{ 2.0 }", "2", True),
        ("boxed", "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", True),
        ("boxed", "the result is 2", "2", False),
        ("boxed", "\\boxed{2", "2", False),
        ("choice", "B", "B", True),
        ("choice", "A look at all: the answer is (C).", "C", True),
        ("choice", "\\boxed{D}", "D", True),
        ("choice", "none of them", "A", False),
    ],
)
def test_an_answer_is_found_and_compared(kind: str, text: str, expected: str, right: bool) -> None:
    given = extract(kind, text)
    assert (given is not None and same(kind, given, expected)) is right


def test_the_last_message_of_the_assistant_counts() -> None:
    def said(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    assert last_text({"output": [said("one"), said("two"), {"type": "function_call"}]}) == "two"
    assert last_text({"output": []}) == last_text({}) == ""
    assert boxed("\\boxed{a{b}c}") == "a{b}c"


def test_the_scripted_policy_answers_most_questions_and_errs_sometimes() -> None:
    async def main() -> list[float]:
        desk = Desk(AnswerMatch("answer_match"), OFF)
        rewards = []
        for row in task_rows("answers"):
            worked = Worked(row, row["task_id"]["task_id"])
            await worked.go(desk.caller("r").use)
            rewards.append(value(await desk.caller("r").verify(worked.verify_body))["reward"])
        return rewards

    rewards = run_virtual(main())
    assert 0.65 <= sum(rewards) / len(rewards) <= 0.95


def test_the_reply_to_verify_holds_what_was_sent_and_the_verdict() -> None:
    async def main() -> Any:
        desk = Desk(AnswerMatch("answer_match"), OFF)
        worked = Worked(next(task_rows("answers")), "s")
        await worked.go(desk.caller("r").use)
        return worked.verify_body, value(await desk.caller("r").verify(worked.verify_body))

    sent, replied = run_virtual(main())
    assert {**replied, **sent} == replied
    assert set(replied) - set(sent) == {"reward", "extracted_answer"}


def judge_app() -> FastAPI:
    """The scripted policy as a judge model."""
    app = FastAPI()

    @app.post("/v1/responses")
    async def respond(request: Request) -> Any:
        decision = decide(jsoncodec.loads(await request.body())["input"], [], "")
        return {"output": [{"type": "message", "role": "assistant", "content": [{"text": decision.text}]}]}

    return app


JUDGE = ServerRef("judge", "http://judge")


def judged_desk(network: MemoryNetwork, **options: Any) -> Desk:
    server = Judged("judged", JudgedOptions(**options), JUDGE, clock=VirtualClock(), transport=network)
    return Desk(server, OFF)


def test_a_judge_model_decides() -> None:
    async def main() -> list[float]:
        network = MemoryNetwork()
        network.serve(JUDGE, judge_app())
        desk = judged_desk(network)
        rewards = []
        for row in task_rows("judged"):
            worked = Worked(row, row["task_id"]["task_id"])
            await worked.go(desk.caller("r").use)
            rewards.append(value(await desk.caller("r").verify(worked.verify_body))["reward"])
        assert {exchange.path for exchange in network.exchanges} == {"/v1/responses"}  # no capture key
        return rewards

    rewards = run_virtual(main())
    assert 0.6 <= sum(rewards) / len(rewards) <= 0.9


def test_a_slow_judge_is_slow() -> None:
    async def main() -> float:
        network = MemoryNetwork()
        network.serve(JUDGE, judge_app())
        desk = judged_desk(network, judge_delay_s=40.0)
        body = {"question": "q", "expected_answer": "a", "response": {}}
        await desk.caller("r").verify(body)
        return desk.clock.monotonic()

    assert run_virtual(main()) == pytest.approx(40.0)


def test_a_judge_that_cannot_be_reached_or_says_nothing_is_an_error_and_no_reward() -> None:
    async def main() -> list[str]:
        network = MemoryNetwork()
        body = {"question": "q", "expected_answer": "a", "response": {}}
        gone = code(await judged_desk(network).caller("r").verify(body))
        network.serve(JUDGE, FastAPI())
        silent = code(await judged_desk(network).caller("r").verify(body))
        return [gone, silent, code(await judged_desk(network).caller("r").verify({"response": {}}))]

    assert run_virtual(main()) == ["503 not_sent", "502 server_error", "400 usage"]
