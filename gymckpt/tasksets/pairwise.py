"""The task set `pairwise`: four answers to each question, and a judge that says which of two is the better one."""

import random
import re
from collections.abc import Iterator
from typing import Any

from gymckpt.tasksets.decision import Decision

PROMPTS = 10
MEMBERS = 4

_SUBJECTS = {
    "a harbour": ("anchor", "crane", "ferry", "fog", "gull", "lighthouse", "pier", "rope", "sail", "tide"),
    "a kitchen": ("apron", "bread", "kettle", "knife", "oven", "pan", "salt", "sink", "spoon", "steam"),
    "a forest": ("bark", "bird", "fern", "fox", "moss", "mushroom", "owl", "pine", "shade", "stream"),
    "a workshop": ("bench", "dust", "drill", "glue", "hammer", "lamp", "nail", "plane", "saw", "vice"),
    "a market": ("apple", "basket", "coin", "crowd", "fish", "flower", "scale", "shout", "stall", "tent"),
}
_FORMS = ("Describe {} in one sentence.", "What is there to see in {}? Say it in one sentence.")
_QUESTION = re.compile(
    r"(?:Describe|What is there to see in) (a \w+)(?: in one sentence\.|\? Say it in one sentence\.)"
)

FIRST, SECOND, TIE = "[[first]]", "[[second]]", "[[tie]]"
_PROMPT = (
    "You compare two answers to one question. The one that shows more of the subject is better.\n"
    f"End with {FIRST}, {SECOND} or {TIE} and nothing after it.\n\n"
    "<question>\n{question}\n</question>\n\n<first>\n{first}\n</first>\n\n<second>\n{second}\n</second>"
)
_PARTS = re.compile(
    r"\AYou compare two answers to one question\..*?<question>\n(.*?)\n</question>\n\n"
    r"<first>\n(.*)\n</first>\n\n<second>\n(.*)\n</second>\Z",
    re.DOTALL,
)


def pairwise_rows() -> Iterator[dict[str, Any]]:
    """The 40 tasks: ten prompts, each four times with seeds of their own."""
    questions = [form.format(subject) for form in _FORMS for subject in _SUBJECTS]
    for prompt, question in enumerate(questions):
        for member in range(MEMBERS):
            task_id = f"pairwise-{prompt:02d}-{member}"
            yield {
                "task_id": {"taskset": "pairwise", "task_id": task_id},
                "task_input": {
                    "responses_create_params": {
                        "input": [{"role": "user", "content": question}],
                        "metadata": {"seed": task_id},
                    },
                    "task_data": {"question": question, "cohort": f"pairwise-{prompt:02d}", "cohort_size": MEMBERS},
                },
            }


def judge_prompt(question: str, first: str, second: str) -> str:
    """What a judge model is asked about two answers."""
    return _PROMPT.format(question=question, first=first, second=second)


def score_of(text: str) -> float | None:
    """What a judge's reply gives the first answer: 1, 0, or 0.5 for a tie; None without a verdict. The last counts."""
    places = {score: text.rfind(word) for word, score in ((FIRST, 1.0), (SECOND, 0.0), (TIE, 0.5))}
    score = max(places, key=places.__getitem__)
    return score if places[score] >= 0 else None


def judge(prompt: str) -> Decision | None:
    """The scripted judge: the answer that names more things of the subject; None if this is no prompt of ours."""
    match = _PARTS.match(prompt)
    asked = _QUESTION.search(match.group(1)) if match else None
    if match is None or asked is None or asked.group(1) not in _SUBJECTS:
        return None
    things = _SUBJECTS[asked.group(1)]
    first, second = (len(set(re.findall(r"\w+", text.lower())) & set(things)) for text in match.groups()[1:])
    verdict = TIE if first == second else FIRST if first > second else SECOND
    return Decision(text=f"The first names {first} things, the second {second}. {verdict}")


def answer(question: str, seed: str) -> Decision | None:
    """The scripted policy's answer, with more or fewer things in it; None if this is no question of ours."""
    match = _QUESTION.search(question)
    if match is None or match.group(1) not in _SUBJECTS:
        return None
    things = _SUBJECTS[match.group(1)]
    chance = random.Random(f"pairwise {seed} {question}")
    named = chance.sample(things, chance.randint(2, len(things) - 1))
    return Decision(text=f"There is {', '.join(named[:-1])} and {named[-1]} in {match.group(1)}.")
