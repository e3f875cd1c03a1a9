"""The task set `workbench`: 200 errands in an office and its warehouses, of 6 to 25 rounds of tool calls each."""

import random
from collections.abc import Iterator
from typing import Any

from gymckpt.tasksets.decision import ToolCall
from gymckpt.tasksets.desk_jobs import DESK_JOBS
from gymckpt.tasksets.jobs import Draw, Job, Round
from gymckpt.tasksets.office import TODAY, make_office
from gymckpt.tasksets.trade_jobs import TRADE_JOBS
from gymckpt.tasksets.workbench_tools import WORKBENCH_TOOLS

TASK_COUNT = 200
MIN_ROUNDS, MAX_ROUNDS = 6, 25

JOBS = (*TRADE_JOBS, *DESK_JOBS)
"""Every kind of job."""

INSTRUCTIONS = (
    f"You run the office and the warehouses. Today is {TODAY}. Do the errands one after the other, in their order, "
    "with the tools, and do nothing else. When all are done, say so in one sentence."
)


def workbench_rows() -> Iterator[dict[str, Any]]:
    """The 200 tasks."""
    for index in range(TASK_COUNT):
        yield _row(f"workbench-{index:03d}")


def solution_of(task_data: dict[str, Any]) -> list[Round]:
    """The reference solution in a task's data, as rounds of calls."""
    return [[ToolCall(one["name"], one["arguments"]) for one in calls] for calls in task_data["solution"]]


def _row(task_id: str) -> dict[str, Any]:
    jobs = _jobs(task_id)
    errands = "\n".join(f"{number}. {job.sentence}" for number, job in enumerate(jobs, 1))
    rounds = [calls for job in jobs for calls in job.solution]
    return {
        "task_id": {"taskset": "workbench", "task_id": task_id},
        "task_input": {
            "responses_create_params": {
                "input": [
                    {"role": "developer", "content": INSTRUCTIONS},
                    {"role": "user", "content": f"Here are the errands:\n{errands}"},
                ],
                "tools": list(WORKBENCH_TOOLS),
                "metadata": {"seed": task_id},
            },
            "task_data": {
                "office": task_id,
                "solution": [[{"name": one.name, "arguments": one.arguments} for one in calls] for calls in rounds],
            },
        },
    }


def _jobs(task_id: str) -> list[Job]:
    """Two to six jobs of different kinds whose solution has a length spread over the whole range."""
    chance = random.Random(f"errands {task_id}")
    wanted = chance.randint(MIN_ROUNDS, MAX_ROUNDS - 3)
    draw = Draw(make_office(task_id), chance)
    jobs: list[Job] = []
    rounds = 0
    for kind in chance.sample(JOBS, len(JOBS)):
        job = kind.make(draw)
        if rounds + len(job.solution) <= MAX_ROUNDS:
            jobs.append(job)
            rounds += len(job.solution)
        if rounds >= wanted:
            break
    return jobs
