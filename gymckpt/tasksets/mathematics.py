"""The task set `math`: questions whose right answer can be written in more than one way."""

import random
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from gymckpt.tasksets.decision import Decision

TASK_COUNT = 30
SLIP_RATE = 0.2

_SUM = re.compile(r"What is (\d+)/(\d+) \+ (\d+)/(\d+)\?")
_PRODUCT = re.compile(r"Multiply \(x \+ (\d+)\) by \(x \+ (\d+)\)\.")
_ROOT = re.compile(r"What is the square root of (\d+) \* (\d+) \* (\d+), exactly\?")


def math_rows() -> Iterator[dict[str, Any]]:
    """The 30 tasks."""
    for index in range(TASK_COUNT):
        task_id = f"math-{index:03d}"
        question, expected = _question(random.Random(f"question {task_id}"), index)
        yield {
            "task_id": {"taskset": "math", "task_id": task_id},
            "task_input": {
                "responses_create_params": {
                    "input": [{"role": "user", "content": f"{question} Put the result into \\boxed{{}}."}],
                    "metadata": {"seed": task_id},
                },
                "task_data": {"question": question, "expected_answer": expected},
            },
        }


def _question(chance: random.Random, index: int) -> tuple[str, str]:
    match index % 3:
        case 0:
            a, b, c, d = (chance.randint(1, 9), chance.randint(3, 12), chance.randint(1, 9), chance.randint(3, 12))
            total = Fraction(a, b) + Fraction(c, d)
            return f"What is {a}/{b} + {c}/{d}?", f"\\frac{{{total.numerator}}}{{{total.denominator}}}"
        case 1:
            a, b = chance.randint(1, 9), chance.randint(1, 9)
            return f"Multiply (x + {a}) by (x + {b}).", f"x^2 + {a + b}x + {a * b}"
        case _:
            a, b = chance.randint(2, 9), chance.choice((2, 3, 5, 7))
            return f"What is the square root of {a} * {a} * {b}, exactly?", f"{a}\\sqrt{{{b}}}"


def answer(question: str, seed: str) -> Decision | None:
    """The scripted policy's answer: right in a form that is not the reference's, wrong one time in five.

    None if this is no question of ours.
    """
    slip = int(random.Random(f"math {seed} {question}").random() < SLIP_RATE)
    if match := _SUM.search(question):
        a, b, c, d = map(int, match.groups())
        return Decision(text=f"With one denominator that is \\boxed{{\\frac{{{a * d + c * b + slip}}}{{{b * d}}}}}.")
    if match := _PRODUCT.search(question):
        a, b = map(int, match.groups())
        return Decision(text=f"Term by term: \\boxed{{{a * b + slip} + {a}x + {b}x + x^2}}.")
    if match := _ROOT.search(question):
        a, _, b = map(int, match.groups())
        return Decision(text=f"It is \\boxed{{\\sqrt{{{a * a * b + slip}}}}}.")
    return None
