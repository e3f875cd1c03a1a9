"""The kinds of job that a workbench task is made of.

Each kind states itself in one sentence, knows its reference solution from the office alone, and has a plan by which the
scripted policy works: it reads the sentence, looks things up with tools, and acts on what they answered. Plan and
reference are written apart on purpose: one checks the other.
"""

import random
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gymckpt.tasksets.decision import ToolCall
from gymckpt.tasksets.office import DAYS, FIRST_ORDER_ID, WAREHOUSES, Customer, Office, Product, clock_time, minutes_of

Round: TypeAlias = list[ToolCall]
"""Calls that a model makes in one turn."""

Plan: TypeAlias = Generator[Round, list[Any], None]
"""Yields rounds and is sent their outputs (JSON values; None where a call gave none). May raise `PlanLost`."""


class PlanLost(Exception):
    """What the tools answered does not fit the job."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a task: its sentence, and the rounds of calls that do it."""

    sentence: str
    solution: list[Round]


@dataclass
class Draw:
    """What the jobs of one task are about; nothing is drawn twice, so that no job disturbs another."""

    office: Office
    chance: random.Random
    new_orders: int = 0
    _customers: list[Customer] = field(init=False)
    _products: list[Product] = field(init=False)
    _days: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._customers = self.chance.sample(self.office.customers, len(self.office.customers))
        self._products = self.chance.sample(self.office.products, len(self.office.products))
        self._days = self.chance.sample(DAYS, len(DAYS))

    def customer(self) -> Customer:
        return self._customers.pop()

    def product(self) -> Product:
        return self._products.pop()

    def day(self) -> str:
        return self._days.pop()

    def order_id(self) -> int:
        """The id that the next created order gets."""
        self.new_orders += 1
        return FIRST_ORDER_ID + len(self.office.orders) + self.new_orders - 1


@dataclass(frozen=True, slots=True)
class JobKind:
    """How one kind of job is made, recognised and worked on."""

    name: str
    make: Callable[[Draw], Job]
    pattern: re.Pattern[str]
    plan: Callable[[re.Match[str]], Plan]


def call(name: str, /, **arguments: Any) -> ToolCall:
    """A tool call with `arguments` in this order."""
    return ToolCall(name, arguments)


def rows_of(output: Any, key: str) -> list[dict[str, Any]]:
    """The list at `key` of a tool's answer; raises `PlanLost` if there is none."""
    found = output.get(key) if isinstance(output, dict) else None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise PlanLost
    return found


def one(output: Any, key: str, name: str) -> dict[str, Any]:
    """The row called `name` in the list at `key`; raises `PlanLost` if there is none."""
    for row in rows_of(output, key):
        if row.get("name") == name:
            return row
    raise PlanLost


def value(output: Any, key: str) -> Any:
    """A field of a tool's answer; raises `PlanLost` if it is missing."""
    if not isinstance(output, dict) or key not in output:
        raise PlanLost
    return output[key]


def first_gap(events: Sequence[tuple[str, int]], minutes: int) -> str:
    """The earliest start from 09:00 at which `minutes` are free, given (start, minutes) of a day's events."""
    start = 9 * 60
    for begin, length in sorted((minutes_of(text), length) for text, length in events):
        if begin - start >= minutes:
            break
        start = max(start, begin + length)
    return clock_time(start)


def other_warehouse(chance: random.Random, warehouse: str) -> str:
    """A warehouse that is not this one."""
    return chance.choice([name for name in WAREHOUSES if name != warehouse])
