"""The task set `shell`: sums kept in a live shell, which no checkpoint can capture."""

import random
import re
from collections.abc import Iterator
from typing import Any

from gymckpt.tasksets.decision import Decision, ToolCall

TASK_COUNT = 40
SLIP_RATE = 0.15
TOOL = "run_line"
RESULT_FILE = "result.txt"

SHELL_TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "name": TOOL,
        "description": "Run one line in the shell of this session and see its output and exit status.",
        "parameters": {
            "type": "object",
            "properties": {"line": {"type": "string"}},
            "required": ["line"],
            "additionalProperties": False,
        },
        "strict": True,
    },
)
_TASK = re.compile(r"Set the shell variable total to (\d+)\. Then add, each in a line of its own: ([\d, ]+)\.")


def shell_rows() -> Iterator[dict[str, Any]]:
    """The 40 tasks."""
    for index in range(TASK_COUNT):
        task_id = f"shell-{index:03d}"
        chance = random.Random(f"shell {task_id}")
        first, *more = (chance.randint(2, 99) for _ in range(chance.randint(4, 9)))
        text = (
            f"Set the shell variable total to {first}. Then add, each in a line of its own: "
            f"{', '.join(map(str, more))}. At last write total into the file {RESULT_FILE}."
        )
        yield {
            "task_id": {"taskset": "shell", "task_id": task_id},
            "task_input": {
                "responses_create_params": {
                    "input": [{"role": "user", "content": text}],
                    "tools": list(SHELL_TOOLS),
                    "metadata": {"seed": task_id},
                },
                "task_data": {"file": RESULT_FILE, "expected_text": str(first + sum(more))},
            },
        }


def work(task: str, done: int, seed: str) -> Decision | None:
    """The scripted policy's turn after `done` calls; None if this is no task of ours."""
    match = _TASK.search(task)
    if match is None:
        return None
    first, more = int(match.group(1)), [int(number) for number in match.group(2).split(", ")]
    chance = random.Random(f"shell {seed} {task}")
    if chance.random() < SLIP_RATE:
        more[chance.randrange(len(more))] += 1
    lines = [f"total={first}", *(f"total=$((total + {number}))" for number in more), f'echo "$total" > {RESULT_FILE}']
    if done >= len(lines):
        return Decision(text=f"The total is in {RESULT_FILE}.")
    return Decision(calls=(ToolCall(TOOL, {"line": lines[done]}),), text=f"Line {done + 1} of {len(lines)}.")
