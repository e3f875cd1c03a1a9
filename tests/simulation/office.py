"""What the simulated episodes are about: a scripted worker, and a resources server that remembers each call.

A task asks for `rounds` rounds of `width` tool calls. Worker and verifier are functions of task and conversation, so
that an interrupted run must end as an undisturbed one does; each writes what it was asked into a log of the world's.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.servers.resources.server import Call, ResourcesServer, Seed, Verification, tool
from gymckpt.wire.control import ResourcesMode, VerifyMode
from gymckpt.wire.cuts import HEADER_CAPTURE_KEY
from tests.simulation.transport import Message

EXPORTED_TASKSET = "work"
RESTART_TASKSET = "shell"

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


@dataclass
class Worker:
    """An ASGI app: an inference server whose answer follows from the conversation."""

    audit: Audit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message: Message = await receive()
        answer: Any = {"status": "ok"}
        if scope["method"] == "POST":
            headers = dict(scope["headers"])
            answer = await self._answer(headers, jsoncodec.loads(message["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": jsoncodec.dumps(answer)})

    async def _answer(self, headers: dict[bytes, bytes], body: dict[str, Any]) -> dict[str, Any]:
        said = body["input"] if isinstance(body["input"], list) else []
        rounds, width, _ = (int(number) for number in body["metadata"]["seed"].split("/")[0].split("x"))
        seen = [item["output"] for item in said if item.get("type") == "function_call_output"]
        turn = len(seen) // width
        key = headers.get(HEADER_CAPTURE_KEY.encode(), b"").decode()
        self.audit("policy_model", EpisodeId.parse(key) if key else None, turn)
        await asyncio.sleep(seconds(body["metadata"], turn, most=4.0))
        if turn < rounds:
            output: list[dict[str, Any]] = [
                {
                    "type": "function_call",
                    "id": f"fc_{turn}_{k}",
                    "call_id": f"c{turn}-{k}",
                    "name": "add",
                    "arguments": jsoncodec.dumps({"turn": turn, "k": k}).decode(),
                    "status": "completed",
                }
                for k in range(width)
            ]
        else:
            text = hashlib.sha256(jsoncodec.dumps(seen)).hexdigest()[:12]
            content = [{"type": "output_text", "text": text, "annotations": []}]
            output = [{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}]
        usage = {"input_tokens": 10 + turn, "output_tokens": 2, "total_tokens": 12 + turn}
        return {"id": f"resp_{turn}", "object": "response", "model": "scripted", "output": output, "usage": usage}


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
