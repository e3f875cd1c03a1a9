"""A task worked through by the scripted policy, with tools of any kind: what an agent's loop comes down to."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from gymckpt import jsoncodec
from gymckpt.tasksets.decision import Decision
from gymckpt.tasksets.policy import decide

UseTool = Callable[[str, dict[str, Any]], Awaitable[Any]]


@dataclass
class Worked:
    """A conversation as far as it has gone."""

    row: dict[str, Any]
    seed: str
    items: list[dict[str, Any]] = field(init=False)
    rounds: int = 0

    def __post_init__(self) -> None:
        self.items = list(self.row["task_input"]["responses_create_params"]["input"])

    @property
    def task_data(self) -> dict[str, Any]:
        data: dict[str, Any] = self.row["task_input"]["task_data"]
        return data

    def decide(self) -> Decision:
        parameters = self.row["task_input"]["responses_create_params"]
        return decide(self.items, parameters.get("tools", []), self.seed)

    async def go(self, use_tool: UseTool, max_rounds: int = 100) -> bool:
        """Go on until the policy is done (True), or for `max_rounds` more rounds."""
        for _ in range(max_rounds):
            decision = self.decide()
            if decision.final:
                self._say(decision.text)
                return True
            self.rounds += 1
            for number, call in enumerate(decision.calls):
                arguments = jsoncodec.dumps(call.arguments).decode()
                call_id = f"{self.rounds}-{number}"
                self.items.append(
                    {"type": "function_call", "call_id": call_id, "name": call.name, "arguments": arguments}
                )
            for number, call in enumerate(decision.calls):
                answer = jsoncodec.dumps(await use_tool(call.name, call.arguments)).decode()
                call_id = f"{self.rounds}-{number}"
                self.items.append({"type": "function_call_output", "call_id": call_id, "output": answer})
        return False

    def _say(self, text: str) -> None:
        self.items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})

    @property
    def verify_body(self) -> dict[str, Any]:
        """What an environment server posts to `/verify`."""
        return {
            **self.task_data,
            "responses_create_params": self.row["task_input"]["responses_create_params"],
            "response": {"output": self.items[-1:]},
        }
