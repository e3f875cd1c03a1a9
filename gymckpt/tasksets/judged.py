"""The task set `judged`: questions whose answers a judge model compares with a reference."""

import random
import re
from collections.abc import Iterator
from typing import Any

from gymckpt.tasksets.decision import Decision

SLIP_RATE = 0.25

_MEANINGS = {
    "anchor": "a heavy hook that keeps a ship in its place",
    "bakery": "a place where bread is made and sold",
    "compass": "an instrument whose needle points north",
    "dynamo": "a machine that turns motion into electricity",
    "estuary": "the mouth of a river where it meets the tide",
    "ferry": "a boat that carries people across water",
    "glacier": "a slow river of ice on a mountain",
    "harvest": "the gathering of ripe crops",
    "inventory": "a list of everything that is in stock",
    "joist": "a beam that carries a floor",
    "kiln": "an oven for firing clay",
    "ledger": "a book in which accounts are kept",
    "monsoon": "a wind that brings the rainy season",
    "nectar": "the sweet liquid that bees collect from flowers",
    "orchard": "a field of fruit trees",
    "piston": "a plate that slides inside a cylinder",
    "quarry": "a pit from which stone is cut",
    "rudder": "a blade at the stern that steers a boat",
    "sextant": "an instrument that measures the height of stars",
    "tannery": "a place where hides are made into leather",
}
_FORMS = ("In one sentence: what is meant by '{}'?", "Explain the word '{}' to a child, in one sentence.")
_QUESTION = re.compile(r"(?:In one sentence: what is meant by|Explain the word) '([a-z]+)'")

SAME, DIFFERENT = "[[same]]", "[[different]]"
_PROMPT = (
    "You compare answers. Say whether the answer means the same as the reference, for the question asked.\n"
    f"End with {SAME} or {DIFFERENT} and nothing after it.\n\n"
    "<question>\n{question}\n</question>\n\n<reference>\n{reference}\n</reference>\n\n<answer>\n{answer}\n</answer>"
)
_PARTS = re.compile(
    r"\AYou compare answers\..*<reference>\n(.*?)\n</reference>\n\n<answer>\n(.*)\n</answer>\Z", re.DOTALL
)


def judged_rows() -> Iterator[dict[str, Any]]:
    """The 40 tasks."""
    for index, (form, word) in enumerate((form, word) for form in _FORMS for word in _MEANINGS):
        task_id = f"judged-{index:03d}"
        yield {
            "task_id": {"taskset": "judged", "task_id": task_id},
            "task_input": {
                "responses_create_params": {
                    "input": [{"role": "user", "content": form.format(word)}],
                    "metadata": {"seed": task_id},
                },
                "task_data": {"question": form.format(word), "expected_answer": f"It is {_MEANINGS[word]}."},
            },
        }


def judge_prompt(question: str, reference: str, answer: str) -> str:
    """What a judge model is asked."""
    return _PROMPT.format(question=question, reference=reference, answer=answer)


def verdict_of(text: str) -> bool | None:
    """Whether a judge's reply says `same`; None if it says neither. The last verdict in the text counts."""
    same, different = text.rfind(SAME), text.rfind(DIFFERENT)
    if same == different:
        return None
    return same > different


def judge(prompt: str) -> Decision | None:
    """The scripted judge: same if the answer contains the reference; None if this is no prompt of ours."""
    match = _PARTS.match(prompt)
    if match is None:
        return None
    reference, given = (" ".join(re.findall(r"\w+", text.lower())) for text in match.groups())
    if reference and reference in given:
        return Decision(text=f"The answer says what the reference says. {SAME}")
    return Decision(text=f"The answer is about something else. {DIFFERENT}")


def answer(question: str, seed: str) -> Decision | None:
    """The scripted policy's answer, about another word one time in four; None if this is no question of ours."""
    match = _QUESTION.search(question)
    if match is None or match.group(1) not in _MEANINGS:
        return None
    word = match.group(1)
    chance = random.Random(f"judged {seed} {question}")
    if chance.random() < SLIP_RATE:
        word = chance.choice([other for other in _MEANINGS if other != word])
    return Decision(text=f"It is {_MEANINGS[word]}.")
