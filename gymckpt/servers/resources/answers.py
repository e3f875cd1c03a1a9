"""`answer_match`: the reward is 1 if the answer is the expected one, as a text, in a box, or as a letter."""

import re
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymckpt.errors import UsageError
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.resources.app import resources_app
from gymckpt.servers.resources.options import read_options
from gymckpt.servers.resources.server import ResourcesServer, Verification
from gymckpt.servers.resources.texts import boxed, last_text
from gymckpt.settings import CheckpointSettings, Settings
from gymckpt.wire.control import ResourcesMode, VerifyMode

_LETTER = re.compile(r"\b([A-Z])\b")
_NAMED_LETTER = re.compile(r"(?:answer|option|choice)\W*(?:is\W*)?\(?([A-Z])\b", re.IGNORECASE)


class MatchData(BaseModel):
    """The fields of a task that this server reads."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    match: Literal["exact", "boxed", "choice"] = "exact"
    expected_answer: str = Field(max_length=1 << 20)


class AnswerMatchOptions(Settings):
    """There is nothing to tell it."""


class AnswerMatch(ResourcesServer):
    """No state: a verdict depends on the answer alone, so it can be given again at any time."""

    checkpoint_mode: ClassVar[ResourcesMode] = "stateless"
    checkpoint_verify: ClassVar[VerifyMode] = "replay"

    async def verify(self, verification: Verification) -> dict[str, Any]:
        """`{"reward", "extracted_answer"}`."""
        try:
            data = MatchData.model_validate(verification.body)
        except ValidationError as error:
            raise UsageError(f"the task's data: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
        given = extract(data.match, last_text(verification.response))
        right = given is not None and same(data.match, given, data.expected_answer)
        return {"reward": 1.0 if right else 0.0, "extracted_answer": given}


def extract(kind: str, text: str) -> str | None:
    """The answer in what a model said; None if there is none of this kind."""
    match kind:
        case "boxed":
            return boxed(text)
        case "choice":
            said = boxed(text) or text
            named = _NAMED_LETTER.findall(said) or _LETTER.findall(said)
            return named[-1].upper() if named else None
    return text.strip() or None


def same(kind: str, given: str, expected: str) -> bool:
    """Whether they are the same answer: case and spaces aside; in a box also as numbers."""
    if " ".join(given.split()).casefold() == " ".join(expected.split()).casefold():
        return True
    if kind != "boxed":
        return False
    try:
        return Decimal(given.replace(",", "")) == Decimal(expected.replace(",", ""))
    except InvalidOperation:
        return False


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """See `servers.registry.Builder`."""
    read_options(AnswerMatchOptions, instance, options)
    return resources_app(AnswerMatch(instance), checkpoint)
