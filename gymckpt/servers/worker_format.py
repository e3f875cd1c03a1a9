"""The text of a model's turn, and the replies of both APIs made from it.

Text grammar, as small instruct models write it: an optional `<think>...</think>`, then text, then any number of
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Ids in replies are fresh and random: they are volatile, and
nothing may depend on them.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gymckpt.servers.worker_engine import FinishReason
from gymckpt.servers.worker_tokens import Token
from gymckpt.tasksets.decision import Decision
from gymckpt.wire.responses import CHAT, Route

_THOUGHT = re.compile(r"\A<think>(.*?)</think>", re.DOTALL)
_CALL = re.compile(r"\n?<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    """JSON, as written."""


@dataclass(frozen=True, slots=True)
class Said:
    """A turn, taken apart."""

    thought: str
    text: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished turn."""

    text: str
    tokens: Sequence[Token]
    prompt_token_ids: Sequence[int]
    finish_reason: FinishReason


def write(decision: Decision, thought: str = "") -> str:
    """The text of a turn that says `decision`."""
    parts = [f"<think>{thought}</think>"] if thought else []
    parts.append(decision.text)
    for call in decision.calls:
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        parts.append(f"\n<tool_call>{body}</tool_call>")
    return "".join(parts)


def read(text: str) -> Said:
    """Take a turn's text apart; a call that is no JSON (cut off, or badly written) stays text."""
    thought = ""
    if match := _THOUGHT.match(text):
        thought, text = match.group(1), text[match.end() :]
    calls: list[Call] = []

    def take(found: re.Match[str]) -> str:
        try:
            value = json.loads(found.group(1))
            arguments = value["arguments"]
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(Call(str(value["name"]), written))
        except (ValueError, KeyError, TypeError):
            return found.group(0)
        return ""

    text = _CALL.sub(take, text)
    return Said(thought, text.strip() if calls else text, tuple(calls))


def reply(route: Route, body: dict[str, Any], answer: Answer, *, model: str, created_at: int) -> dict[str, Any]:
    """The reply to a request on `route`. Token ids and log probabilities stand at the top level, and additionally on
    the last output item, in the form trainers read, when the request says `return_token_ids: true`."""
    make = _chat_reply if route == CHAT else _responses_reply
    made = make(body, read(answer.text), answer, model, created_at)
    made["token_ids"] = [token.id for token in answer.tokens]
    made["log_probs"] = [token.logprob for token in answer.tokens]
    return made


def _training_fields(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_token_ids": list(answer.prompt_token_ids),
        "generation_token_ids": [token.id for token in answer.tokens],
        "generation_log_probs": [token.logprob for token in answer.tokens],
    }


def _responses_reply(body: dict[str, Any], said: Said, answer: Answer, model: str, created_at: int) -> dict[str, Any]:
    whole = answer.finish_reason == "stop"
    status = "completed" if whole else "incomplete"
    output: list[dict[str, Any]] = []
    if said.thought:
        thought = [{"type": "summary_text", "text": said.thought}]
        output.append({"id": _fresh("rs"), "type": "reasoning", "summary": thought, "encrypted_content": None})
    if said.text or not said.calls:
        content = [{"type": "output_text", "text": said.text, "annotations": []}]
        message = {"id": _fresh("msg"), "type": "message", "role": "assistant", "status": status, "content": content}
        output.append(message)
    output += [
        {
            "arguments": call.arguments,
            "call_id": _fresh("call"),
            "name": call.name,
            "type": "function_call",
            "id": _fresh("fc"),
            "status": "completed",
        }
        for call in said.calls
    ]
    if body.get("return_token_ids") is True:
        output[-1].update(_training_fields(answer))
    prompt, generated = len(answer.prompt_token_ids), len(answer.tokens)
    return {
        "id": _fresh("resp"),
        "object": "response",
        "created_at": created_at,
        "status": status,
        "error": None,
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": model,
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "temperature": body.get("temperature", 1.0),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p", 1.0),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + generated,
        },
    }


def _chat_reply(body: dict[str, Any], said: Said, answer: Answer, model: str, created_at: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text or None}
    if said.thought:
        message["reasoning_content"] = said.thought
    if said.calls:
        message["tool_calls"] = [
            {
                "id": _fresh("call"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in said.calls
        ]
    if body.get("return_token_ids") is True:
        message.update(_training_fields(answer))
    finish = "tool_calls" if said.calls and answer.finish_reason == "stop" else answer.finish_reason
    prompt, generated = len(answer.prompt_token_ids), len(answer.tokens)
    return {
        "id": _fresh("chatcmpl"),
        "object": "chat.completion",
        "created": created_at,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        },
    }


def _fresh(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
