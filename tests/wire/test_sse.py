"""Answers that are not of the API's shape end their stream with a failure, not in the middle."""

from typing import Any

import pytest

from gymckpt.wire import sse
from gymckpt.wire.responses import CHAT, RESPONSES, Route


@pytest.mark.parametrize(
    ("route", "reply"),
    [
        (RESPONSES, {"output": ["text"]}),
        (RESPONSES, {"output": {"type": "message"}}),
        (RESPONSES, {"output": [{"type": "message", "content": ["text"]}]}),
        (RESPONSES, {"output": [{"type": "message", "content": "text"}]}),
        (CHAT, {"choices": ["text"]}),
        (CHAT, {"choices": {"index": 0}}),
        (CHAT, {"choices": [{"message": "text"}]}),
        (CHAT, {"choices": [{"message": {"tool_calls": ["text"]}}]}),
    ],
)
def test_a_malformed_answer_is_a_failure_event(route: Route, reply: dict[str, Any]) -> None:
    told = b"".join(sse.events(route, reply))
    assert b"not of this API's shape" in told
    assert told.endswith(b"data: [DONE]\n\n" if route == CHAT else b"\n\n")
    assert (b"response.failed" in told) is (route == RESPONSES)
