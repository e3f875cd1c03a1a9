"""The conversation of one episode up to its boundary, from the records of its agent and its environment."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from gymckpt import jsoncodec
from gymckpt.errors import UsageError
from gymckpt.identity import EpisodeId, Kind
from gymckpt.ports import FileSystem, Offload
from gymckpt.report.episodes import open_participant, participants

SHOWN_CHARACTERS = 2000
"""A longer text is cut, with a word on how much is missing."""


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was said or done."""

    who: str
    text: str


async def read_conversation(
    fs: FileSystem, offload: Offload, checkpoint: PurePath, episode: EpisodeId
) -> list[dict[str, Any]]:
    """The items of the Responses API up to the boundary: what the activation began with, what was said since.

    Reads this episode's records only. Raises `UsageError` if no participant holds it, `DamagedState`.
    """
    records: dict[Kind, dict[str, Any]] = {}
    for kind, instance in await offload.run(lambda: participants(fs, checkpoint)):
        reader = await open_participant(fs, offload, checkpoint, kind, instance)
        if (stored := await reader.record(episode)) is not None:
            records[kind] = stored.record
    if not records:
        raise UsageError(
            f"{checkpoint.name} holds nothing of episode {episode}", hint="gymckpt inspect lists the episodes in it"
        )
    return items_of(records.get("agent"), records.get("environment"))


def items_of(agent: Mapping[str, Any] | None, environment: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The items in an agent's record; where it has none any more, the final response in the environment's."""
    state = _at(agent, "boundary", "state")
    conversation = _at(state, "conversation")
    items: list[Any] = []
    if isinstance(conversation, dict):
        for activation in sorted(conversation, key=lambda key: int(key) if str(key).isdecimal() else 0):
            items += _list(_at(conversation, activation, "input")) + _list(_at(conversation, activation, "outputs"))
    if not items:
        items = _list(_at(state, "input")) + _list(_at(state, "outputs"))
    if not items:
        items = _list(_at(environment, "boundary", "state", "response", "output"))
    return [item for item in items if isinstance(item, dict)]


def lines_of(items: list[dict[str, Any]]) -> Iterator[Line]:
    """The items as people read them."""
    for item in items:
        match item.get("type", "message"):
            case "message":
                yield Line(str(item.get("role", "?")), _cut(_text(item.get("content"))))
            case "function_call":
                yield Line("call", _cut(f"{item.get('name')}({item.get('arguments', '')})"))
            case "function_call_output":
                yield Line("result", _cut(_text(item.get("output"))))
            case "reasoning":
                yield Line("reasoning", _cut(_text(item.get("summary")) or _text(item.get("content"))))
            case other:
                yield Line(str(other), _cut(jsoncodec.dumps(item).decode()))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else jsoncodec.dumps(content).decode()


def _cut(text: str) -> str:
    more = len(text) - SHOWN_CHARACTERS
    return text if more <= 0 else f"{text[:SHOWN_CHARACTERS]}… ({more} more characters)"


def _at(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
