"""The task set `answers`: questions with one right answer, said exactly, in a box, or as a letter."""

import random
import re
from collections.abc import Iterator
from typing import Any

from gymckpt.tasksets.decision import Decision

TASK_COUNT = 60
SLIP_RATE = 0.2

_WORDS = ("anchor", "basket", "candle", "dinner", "engine", "forest", "garden", "harbor", "island", "jacket", "kettle")
_BACKWARDS = re.compile(r"Spell the word '([a-z]+)' backwards")
_SUM = re.compile(r"What is (\d+) \* (\d+) \+ (\d+)\?")
_LARGEST = re.compile(r"Which of these numbers is the largest\?((?: [A-D]\) \d+)+)")


def answers_rows() -> Iterator[dict[str, Any]]:
    """The 60 tasks."""
    for index in range(TASK_COUNT):
        task_id = f"answers-{index:03d}"
        question, kind, expected = _question(random.Random(f"question {task_id}"), index)
        yield {
            "task_id": {"taskset": "answers", "task_id": task_id},
            "task_input": {
                "responses_create_params": {
                    "input": [{"role": "user", "content": question}],
                    "metadata": {"seed": task_id},
                },
                "task_data": {"match": kind, "expected_answer": expected},
            },
        }


def _question(chance: random.Random, index: int) -> tuple[str, str, str]:
    match index % 3:
        case 0:
            word = chance.choice(_WORDS)
            return f"Spell the word '{word}' backwards. Answer with that word alone.", "exact", word[::-1]
        case 1:
            a, b, c = chance.randint(11, 99), chance.randint(11, 99), chance.randint(100, 999)
            return f"What is {a} * {b} + {c}? Put the result into \\boxed{{}}.", "boxed", str(a * b + c)
        case _:
            numbers = chance.sample(range(100, 1000), 4)
            options = " ".join(f"{letter}) {number}" for letter, number in zip("ABCD", numbers, strict=True))
            letter = "ABCD"[numbers.index(max(numbers))]
            return f"Which of these numbers is the largest? {options} Answer with its letter alone.", "choice", letter


def answer(question: str, seed: str) -> Decision | None:
    """The scripted policy's answer, wrong about one time in five; None if this is no question of ours."""
    slips = random.Random(f"answers {seed} {question}").random() < SLIP_RATE
    if match := _BACKWARDS.search(question):
        return Decision(text=match.group(1)[::-1] if not slips else match.group(1))
    if match := _SUM.search(question):
        a, b, c = map(int, match.groups())
        result = a * b + c + (10 if slips else 0)
        return Decision(text=f"{a} * {b} = {a * b}, and with {c} more that makes \\boxed{{{result}}}.")
    if match := _LARGEST.search(question):
        options = {letter: int(number) for letter, number in re.findall(r"([A-D]\)) (\d+)", match.group(1))}
        pick = (min if slips else max)(options, key=options.__getitem__)
        return Decision(text=pick.rstrip(")"))
    return None
