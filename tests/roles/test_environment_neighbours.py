"""Calls between servers: what is sent again, what is asked, and how often."""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from gymckpt.errors import DeadlinePassed, NotSent
from gymckpt.ports import ServerRef
from gymckpt.roles.neighbours import NeighbourFailed, Neighbourhood
from tests.simulation.clock import InlineOffload, VirtualClock, run_virtual
from tests.simulation.transport import Fault, MemoryNetwork

OTHER = ServerRef("other", "http://other")


class Answers:
    """A server that gives prepared answers; the last one for ever."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.given = 0
        self._answers = answers
        self.app = FastAPI()
        self.app.add_api_route("/{path:path}", self._answer, methods=["POST", "GET"], response_model=None)

    async def _answer(self, path: str) -> JSONResponse:
        status, body = self._answers[min(self.given, len(self._answers) - 1)]
        self.given += 1
        return JSONResponse(body, status)


def _with(answers: Answers, test: Callable[[Neighbourhood, MemoryNetwork], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.serve(OTHER, answers.app)
        await test(Neighbourhood({"other": OTHER}, network, VirtualClock(), InlineOffload(), "token"), network)

    run_virtual(main())


def _refusal(code: str) -> tuple[int, Any]:
    return 409, {"error": {"code": code, "detail": "no"}}


def test_a_refusal_that_began_nothing_is_sent_again_until_it_is_taken() -> None:
    answers = Answers(*[_refusal("checkpoint_parked")] * 20, *[_refusal("admission_closed")] * 20, (200, {"a": 1}))

    async def test(neighbours: Neighbourhood, _: MemoryNetwork) -> None:
        body, _reply = await neighbours.post_json(OTHER, "/x", {}, timeout_s=100)
        assert body == {"a": 1}
        assert answers.given == 41

    _with(answers, test)


def test_waiting_for_a_closed_server_ends_at_the_deadline() -> None:
    async def test(neighbours: Neighbourhood, _: MemoryNetwork) -> None:
        with pytest.raises((NeighbourFailed, DeadlinePassed)):
            await neighbours.post_json(OTHER, "/x", {}, timeout_s=20)
        assert 19 <= neighbours.clock.monotonic() <= 21

    _with(Answers(_refusal("checkpoint_parked")), test)


@pytest.mark.parametrize("code", ["unknown_session", "stale_attempt", "activation_out_of_order"])
def test_any_other_refusal_is_final(code: str) -> None:
    answers = Answers(_refusal(code))

    async def test(neighbours: Neighbourhood, _: MemoryNetwork) -> None:
        with pytest.raises(NeighbourFailed) as caught:
            await neighbours.post_json(OTHER, "/x", {}, timeout_s=100)
        assert (caught.value.kind, caught.value.terminal, answers.given) == (code, False, 1)

    _with(answers, test)


@pytest.mark.parametrize("body", [[1], "text", None])
def test_a_reply_that_is_no_object_is_a_bad_reply(body: Any) -> None:
    async def test(neighbours: Neighbourhood, _: MemoryNetwork) -> None:
        with pytest.raises(NeighbourFailed) as caught:
            await neighbours.post_json(OTHER, "/x", {}, timeout_s=100)
        assert caught.value.kind == "bad_reply"

    _with(Answers((200, body)), test)


def test_a_neighbour_is_asked_once_whether_it_takes_part() -> None:
    answers = Answers((200, {"mode": "exported"}))

    async def test(neighbours: Neighbourhood, _: MemoryNetwork) -> None:
        for _again in range(3):
            answer = await neighbours.participation("other")
            assert (answer.participant, answer.captures) == (True, True)
        assert answers.given == 1

    _with(answers, test)


@pytest.mark.parametrize(
    ("status", "body", "participant", "captures"),
    [(404, {}, False, False), (200, {"mode": "restart_only"}, True, False), (200, {"kind": "agent"}, True, True)],
)
def test_what_a_status_says(status: int, body: Any, participant: bool, captures: bool) -> None:
    async def test(neighbours: Neighbourhood, _: MemoryNetwork) -> None:
        answer = await neighbours.participation("other")
        assert (answer.participant, answer.captures) == (participant, captures)

    _with(Answers((status, body)), test)


def test_a_neighbour_is_asked_again_after_a_connection_to_it_failed() -> None:
    answers = Answers((200, {}))

    async def test(neighbours: Neighbourhood, network: MemoryNetwork) -> None:
        await neighbours.participation("other")
        network.faults.append(Fault("refused", "other", "/x", times=1000))
        with pytest.raises(NotSent):
            await neighbours.post_json(OTHER, "/x", {}, timeout_s=100)
        await neighbours.participation("other")
        assert answers.given == 2

    _with(answers, test)


def test_a_neighbour_that_cannot_be_asked_counts_as_absent_until_the_next_time() -> None:
    async def test(neighbours: Neighbourhood, network: MemoryNetwork) -> None:
        network.faults.append(Fault("refused", "other", "/status"))
        assert not (await neighbours.participation("other")).participant
        assert (await neighbours.participation("other")).participant

    _with(Answers((200, {})), test)
