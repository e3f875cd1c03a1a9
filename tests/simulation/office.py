"""What the simulated episodes are about: a scripted worker, and a resources server that remembers each call.

A task asks for `rounds` rounds of `width` tool calls. Worker and verifier are functions of task and conversation, so
that an interrupted run must end as an undisturbed one does; each writes what it was asked into a log of the world's.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastapi import FastAPI

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.servers import worker_tokens
from gymckpt.servers.resources.server import Call, ResourcesServer, Seed, Verification, tool
from gymckpt.servers.worker_engine import FinishReason, TurnRequest
from gymckpt.servers.worker_format import write
from gymckpt.servers.worker_tokens import Token
from gymckpt.tasksets.decision import Decision, ToolCall
from gymckpt.wire.control import ResourcesMode, VerifyMode
from gymckpt.wire.cuts import HEADER_CAPTURE_KEY
from tests.simulation.transport import Message

EXPORTED_TASKSET = "work"
RESTART_TASKSET = "shell"

STROKES = 4

Audit = Callable[[str, EpisodeId | None, int], None]
"""(server, episode, number of the call) before it is made."""


@dataclass(frozen=True)
class Job:
    """One planned task."""

    rounds: int
    width: int = 1
    taskset: str = EXPORTED_TASKSET


def row(number: int, job: Job) -> dict[str, Any]:
    """The task's typed row."""
    return {
        "task_id": {"taskset": job.taskset, "task_id": str(number)},
        "task_input": {
            "responses_create_params": {
                "input": f"task {number}",
                "metadata": {"seed": f"{job.rounds}x{job.width}x{number}"},
            },
            "task_data": {"rounds": job.rounds, "width": job.width},
        },
    }


def seconds(*source: Any, most: float) -> float:
    """A duration that is a function of `source`."""
    drawn = hashlib.blake2b(repr(source).encode(), digest_size=4).digest()
    return int.from_bytes(drawn, "big") / 2**32 * most


class OfficeEngine:
    """An inference engine whose answer follows from the conversation; it makes each in a few strokes."""

    model = "scripted"
    policy_version = "office-1"

    async def begin(self, request: TurnRequest) -> "OfficeTurn":
        seen = [item["output"] for item in request.conversation if item.get("type") == "function_call_output"]
        rounds, width, turn = turn_of(request.seed, seen)
        if turn < rounds:
            decision = Decision(tuple(ToolCall("add", {"turn": turn, "k": k}) for k in range(width)))
        else:
            decision = Decision(text=hashlib.sha256(jsoncodec.dumps(seen)).hexdigest()[:12])
        prompt = worker_tokens.encode(jsoncodec.dumps([request.seed, seen]).decode())
        answer = [Token(token, -0.5) for token in worker_tokens.encode(write(decision))]
        return OfficeTurn(prompt, answer, seconds(request.seed, turn, most=4.0))


@dataclass
class OfficeTurn:
    """One answer, known from its beginning."""

    prompt_token_ids: list[int]
    answer: list[Token]
    takes_s: float
    output_limit: int = 1000
    finish_reason: FinishReason = "stop"

    def check_prefix(self, prefix: Sequence[Token]) -> None:
        if list(prefix) != self.answer[: len(prefix)]:
            raise ValueError("another answer")

    async def tokens(self, prefix: Sequence[Token]) -> AsyncIterator[Sequence[Token]]:
        rest = self.answer[len(prefix) :]
        size = -(-len(self.answer) // STROKES)
        for start in range(0, len(rest), size):
            await asyncio.sleep(self.takes_s / STROKES)
            yield rest[start : start + size]

    def text(self, tokens: Sequence[Token]) -> str:
        return worker_tokens.decode(token.id for token in tokens)


@dataclass
class Worker:
    """An ASGI app: the real inference worker, which is overheard."""

    app: FastAPI
    audit: Audit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        first: Message | None = await receive()
        if scope["path"] == "/v1/responses":
            assert first is not None
            key = dict(scope["headers"]).get(HEADER_CAPTURE_KEY.encode(), b"").decode()
            body = jsoncodec.loads(first["body"])
            said = body["input"] if isinstance(body["input"], list) else []
            seen = [item["output"] for item in said if item.get("type") == "function_call_output"]
            _, _, turn = turn_of(body["metadata"]["seed"], seen)
            self.audit("policy_model", EpisodeId.parse(key) if key else None, turn)

        async def again() -> Message:
            nonlocal first
            message, first = first, None
            return message if message is not None else await receive()

        await self.app(scope, again, send)


def turn_of(seed: str, seen: Sequence[Any]) -> tuple[int, int, int]:
    """Rounds and width of the task with this seed, and which turn comes after these outputs of tools."""
    rounds, width, _ = (int(number) for number in seed.split("/")[0].split("x"))
    return rounds, width, len(seen) // width


@dataclass
class _Session:
    steps: list[list[int]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return hashlib.sha256(jsoncodec.dumps(self.steps)).hexdigest()[:12]


class Desk(ResourcesServer):
    """A session is the list of its calls, in order; its verifier wants exactly the right ones."""

    checkpoint_mode: ClassVar[ResourcesMode] = "exported"

    def __init__(self, instance: str, audit: Audit) -> None:
        super().__init__(instance)
        self._audit = audit
        self._sessions: dict[str, _Session] = {}

    async def seed_session(self, seed: Seed) -> None:
        await asyncio.sleep(seconds(seed.task_data, most=1.0))
        self._sessions[seed.session_id] = _Session()

    @tool
    async def add(self, call: Call, *, turn: int, k: int) -> Any:
        session = self._sessions[call.session_id]
        self._audit(self.instance, call.episode, len(session.steps) + 1)
        session.steps.append([turn, k])
        await asyncio.sleep(seconds(turn, k, most=2.0))
        return {"turn": turn, "k": k, "digest": session.digest}

    async def verify(self, verification: Verification) -> dict[str, Any]:
        body = verification.body
        session = self._sessions[verification.session_id or ""]
        await asyncio.sleep(seconds(session.steps, most=3.0))
        wanted = [[turn, k] for turn in range(body["rounds"]) for k in range(body["width"])]
        return {"reward": 1.0 if session.steps == wanted else 0.0, "digest": session.digest}

    async def export_session_state(self, session_id: str) -> Any:
        steps = self._sessions[session_id].steps
        return {"calls": len(steps), "steps": [list(step) for step in steps]}

    async def validate_session_state(self, session_id: str, state: Any) -> None:
        if state["calls"] != len(state["steps"]):
            raise ValueError("calls and steps differ")

    async def restore_session_state(self, session_id: str, state: Any) -> None:
        self._sessions[session_id] = _Session([list(step) for step in state["steps"]])

    async def retire_session_state(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)


class ReplayedDesk(Desk):
    """Its verifier may run twice."""

    checkpoint_verify: ClassVar[VerifyMode] = "replay"


class RestartOnlyDesk(Desk):
    """It cannot capture anything."""

    checkpoint_mode: ClassVar[ResourcesMode] = "restart_only"
