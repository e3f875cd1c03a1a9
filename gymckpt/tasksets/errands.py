"""How the scripted policy works through the errands of a workbench task."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gymckpt.tasksets.decision import Decision, ToolCall
from gymckpt.tasksets.jobs import Plan, PlanLost, Round
from gymckpt.tasksets.workbench import JOBS

SLIP_RATE = 0.15
_ERRAND = re.compile(r"^\d+\. (.+)$", re.MULTILINE)

_COUNTED = frozenset({"add_order_line", "transfer_stock", "reorder_stock"})
_FORGETTABLE = frozenset({"send_mail", "add_note", "archive_mail", "set_price", "create_event", "cancel_order"})


@dataclass
class _Slip:
    """A mistake to come: at the `due`-th call that can go wrong, a wrong quantity or a forgotten step."""

    due: int

    def spoil(self, calls: Round) -> Round:
        if self.due <= 0 or len(calls) != 1:
            return calls
        (only,) = calls
        if only.name not in _COUNTED | _FORGETTABLE:
            return calls
        self.due -= 1
        if self.due:
            return calls
        if only.name in _FORGETTABLE:
            return []
        arguments = dict(only.arguments)
        arguments["quantity"] += 1
        return [ToolCall(only.name, arguments)]


def work(task: str, outputs: Sequence[Any], seed: str) -> Decision | None:
    """The turn that follows `outputs`; None if no errand of ours is asked for.

    The whole plan runs again from the start on every turn, fed with the outputs so far, so that nothing is remembered
    outside the conversation.
    """
    plans = list(_plans(task))
    if not plans:
        return None
    chance = random.Random(f"errands {seed} {task}")
    slip = _Slip(chance.randint(1, 2) if chance.random() < SLIP_RATE else 0)
    left = list(outputs)
    lost = 0
    for number, plan in enumerate(plans, 1):
        try:
            calls = slip.spoil(next(plan))
            while True:
                if len(left) < len(calls):
                    names = " and ".join(call.name for call in calls)
                    return Decision(tuple(calls), f"Errand {number} of {len(plans)}: now {names}.")
                answers, left = left[: len(calls)], left[len(calls) :]
                # A forgotten call has no answer; none of the plans looks at what such a call would have said.
                calls = slip.spoil(plan.send(answers or [None]))
        except StopIteration:
            continue
        except (PlanLost, KeyError, TypeError):
            # The answers do not fit (a tool failed, or another server answers): go on with the next errand.
            lost += 1
    if lost:
        return Decision(text=f"{lost} of {len(plans)} errands could not be done; the others are.")
    return Decision(text=f"All {len(plans)} errands are done.")


def _plans(task: str) -> Iterator[Plan]:
    for errand in _ERRAND.findall(task):
        for kind in JOBS:
            if match := kind.pattern.search(errand):
                yield kind.plan(match)
                break
