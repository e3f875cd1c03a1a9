"""Simple Agent: call the model, run the tools it asks for, and so on until it answers.

A boundary stands before each model call, after each reply (its tool calls are `pending_tools`: a restore goes on with
them, the model is not asked again) and after each tool round. A model call is a replay step; a checkpoint waits for a
tool round.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gymckpt.episodes.boundary import Pin, Snapshot, pointer
from gymckpt.episodes.steps import Track
from gymckpt.ports import ServerRef
from gymckpt.roles.agent_tools import ToolCaller
from gymckpt.roles.neighbours import NeighbourFailed, Neighbourhood
from gymckpt.storage.records import Record
from gymckpt.wire.control import HEADER_RESTART
from gymckpt.wire.gym import rollout_path

LARGE_CONVERSATION = 16
"""Items from which on a request is written off the event loop: with token ids in them, they are large."""

LOOP = "loop"
"""The step that all boundaries inside the loop stand before."""


class LoopState(BaseModel):
    """The loop between two steps. Never changed, but for `outputs`, which grows: `snapshot` pins its length."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    activation: int = Field(ge=0)
    input: list[Any]
    """The conversation that the activation began with."""
    outputs: list[Any] = Field(default_factory=list)
    """Everything since then: what the model said, what the tools answered."""
    step: int = Field(default=0, ge=0)
    """Model calls delivered in this activation."""
    turns: int = Field(default=0, ge=0)
    """Model calls delivered in the rollout."""
    pending_tools: list[dict[str, Any]] = Field(default_factory=list)
    usage: dict[str, Any] | None = None
    last_response: dict[str, Any] | None = None
    """Without its output, which is in `outputs`."""
    model_cookies: dict[str, str] = Field(default_factory=dict)
    tool_cookies: dict[str, str] = Field(default_factory=dict)
    done: bool = False

    def after(self, **changes: Any) -> "LoopState":
        """This state with `changes`, and the same growing list of outputs."""
        return self.model_copy(update=changes)

    def snapshot(self) -> Callable[[], Snapshot]:
        """The state as it is now, for whenever it is exported. The lists are named by activation: a list that is known
        by one name only ever grows."""
        outputs = Pin.of(self.outputs)

        def take() -> Snapshot:
            small: Record = {
                name: getattr(self, name) for name in type(self).model_fields if name not in ("input", "outputs")
            }
            key = str(self.activation)
            small["conversation"] = {key: {"input": self.input, "outputs": outputs.items}}
            lists = {
                pointer("conversation", key, "input"): len(self.input),
                pointer("conversation", key, "outputs"): outputs.length,
            }
            return Snapshot(small, lists)

        return take

    @classmethod
    def read(cls, state: Record) -> "LoopState":
        """The state in a record; raises pydantic's `ValidationError`."""
        conversation = state.get("conversation")
        said = conversation.get(str(state.get("activation"))) if isinstance(conversation, dict) else None
        return cls.model_validate({**state, **(said if isinstance(said, dict) else {})})

    def reply(self) -> dict[str, Any]:
        """The response of the whole activation."""
        return {**(self.last_response or {}), "output": list(self.outputs), "usage": self.usage}


@dataclass(frozen=True, slots=True)
class LoopSetting:
    """What a loop works with, beside its state."""

    neighbours: Neighbourhood
    model: ServerRef
    tools: ToolCaller | None
    model_path: str
    model_timeout_s: float
    max_steps: int | None

    @classmethod
    def prefixed(cls, track: Track, **fields: Any) -> "LoopSetting":
        """With the rollout's prefix on model calls."""
        return cls(model_path=rollout_path(track.episode, "/v1/responses"), **fields)


class Loop:
    """One activation of Simple Agent."""

    def __init__(
        self,
        state: LoopState,
        params: dict[str, Any],
        track: Track,
        setting: LoopSetting,
        *,
        record: Callable[[LoopState, str], None],
        following: str,
    ) -> None:
        self.state = state
        self._params = params
        self._track = track
        self._setting = setting
        self._record = record
        self._following = following

    async def run(self) -> LoopState:
        """Go on from the state to the end. Each boundary is recorded before `loop`, the last before `following`."""
        while not self.state.done:
            if self.state.pending_tools:
                outputs, cookies = await self._track.step("tool_round", "wait", self._tool_round)
                self._take_outputs(outputs, cookies)
            else:
                response, cookies = await self._track.step("model_call", "replay", self._model_call)
                self._take_response(response, cookies)
            self._record(self.state, self._following if self.state.done else LOOP)
        return self.state

    async def _model_call(self) -> tuple[dict[str, Any], dict[str, str]]:
        setting, state = self._setting, self.state
        body = {**self._params, "input": state.input + state.outputs}
        headers = {HEADER_RESTART: "1"} if self._track.restart else None
        response, reply = await setting.neighbours.post_json(
            setting.model,
            setting.model_path,
            body,
            timeout_s=setting.model_timeout_s,
            headers=headers,
            cookies=state.model_cookies,
            large=len(state.outputs) > LARGE_CONVERSATION,
        )
        output = response.get("output")
        if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
            raise NeighbourFailed(f"{setting.model.instance} answered no output list", kind="bad_reply")
        return response, {**state.model_cookies, **reply.cookies}

    def _take_response(self, response: dict[str, Any], cookies: dict[str, str]) -> None:
        state, output = self.state, response["output"]
        state.outputs.extend(output)
        calls = [item for item in output if item.get("type") == "function_call"]
        answered = any(item.get("type") == "message" and item.get("role") == "assistant" for item in output)
        incomplete = response.get("incomplete_details")
        cut_off = isinstance(incomplete, dict) and incomplete.get("reason") == "max_output_tokens"
        # Reasoning alone is no answer: the model is asked again, as Gym's agent does; an empty output ends the loop.
        done = cut_off or not output or (answered and not calls)
        step = state.step + 1
        if not calls and self._out_of_steps(step):
            done = True
        self.state = state.after(
            step=step,
            turns=state.turns + 1,
            pending_tools=[] if done else calls,
            usage=_add_usage(state.usage, response.get("usage")),
            last_response={**response, "output": None},
            model_cookies=cookies,
            done=done,
        )

    async def _tool_round(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        tools = self._setting.tools
        if tools is None:
            return [_no_tools(call) for call in self.state.pending_tools], self.state.tool_cookies
        return await tools.round(self.state.pending_tools, self.state.tool_cookies)

    def _take_outputs(self, outputs: list[dict[str, Any]], cookies: dict[str, str]) -> None:
        self.state.outputs.extend(outputs)
        done = self._out_of_steps(self.state.step)
        self.state = self.state.after(pending_tools=[], tool_cookies=cookies, done=done)

    def _out_of_steps(self, step: int) -> bool:
        return self._setting.max_steps is not None and step >= self._setting.max_steps


def as_items(conversation: Any) -> list[Any]:
    """The `input` of a request as a list of items; a bare string is what the user says."""
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    return list(conversation) if isinstance(conversation, list) else []


def _no_tools(call: dict[str, Any]) -> dict[str, Any]:
    text = '{"error":"this session has no tools"}'
    return {"type": "function_call_output", "call_id": call.get("call_id"), "output": text}


def _add_usage(total: Any, more: Any) -> Any:
    """Token counts of several responses together; what is not a number is kept from the later one."""
    if isinstance(total, dict) and isinstance(more, dict):
        return {name: _add_usage(total.get(name), more.get(name)) for name in {**total, **more}}
    if isinstance(total, int) and isinstance(more, int):
        return total + more
    return total if more is None else more
