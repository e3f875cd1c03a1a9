"""Models of run.json and of the lines of journals and of an index, made of what writes and reads them.

The code that handles these files by the hundred thousand has no pydantic models; their schemas come from here.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from functools import reduce
from operator import or_
from typing import Annotated, Any, Final, Literal, cast, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, Field, create_model

from gymckpt.collection.events import EVENTS, Install, JournalName, Source
from gymckpt.collection.rundirectory import FORMAT, RunRecord
from gymckpt.identity import MAX_ATTEMPT, NAME_PATTERN, EpisodeId
from gymckpt.storage.index import LATER, Header, IndexLine
from gymckpt.storage.manifest import Sha256

_RolloutId = Annotated[str, Field(pattern=NAME_PATTERN)]
_Attempt = Annotated[int, Field(ge=0, le=MAX_ATTEMPT)]
_Count = Annotated[int, Field(ge=0)]
_Crc32c = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
_Any: Any = Any


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Checkpointed(_Strict):
    checkpoint_id: _RolloutId
    attempt: _Attempt


class _Epoch(_Strict):
    number: _Count
    files: dict[str, _Count]


_IN_JSON: Final[Mapping[Any, Any]] = {
    Source: Literal["input"] | _Checkpointed,
    tuple[EpisodeId, ...]: list[tuple[_RolloutId, _Attempt]],
    tuple[Install, ...]: list[tuple[_RolloutId, _Attempt, _Attempt]],
}
"""How a journal writes values of these types."""


def run_file() -> type[BaseModel]:
    """`run.json`, without the digest that every sealed file ends with."""
    members: dict[str, Any] = {name: (hint, ...) for name, hint in get_type_hints(RunRecord).items()}
    return create_model(
        "RunFile",
        __base__=_Strict,
        __doc__="`run.json`.",
        format=(cast(Any, Literal)[FORMAT], ...),
        identity_sha256=(Sha256, ...),
        **members,
    )


def journal_line(journal: JournalName, *, index: bool = False) -> Any:
    """A line of `journal`: the first of an epoch, or an event. `index`: of the index beside the outcomes."""
    events = [_event(kind) for kind in EVENTS.values() if kind.journal == journal]
    event = events[0] if len(events) == 1 else Annotated[reduce(or_, cast(Any, events)), Field(discriminator="event")]
    place: dict[str, Any] = {"at": (tuple[_Count, _Count, _Count, _Count, _Count], ...)} if index else {}
    payload: dict[str, Any] = {"payload": (_Any, ...)} if journal == "outcomes" and not index else {}
    return _line("EpochLine", epoch=(_Epoch, ...), **place) | _line("EventLine", event=(event, ...), **payload, **place)


def index_line() -> dict[str, Any]:
    """The JSON Schema of a line of an index: the first one, or that of an episode."""
    typed: list[Any] = []
    for field in msgspec.structs.fields(IndexLine):
        if field.name == "where":
            continue
        later = LATER.get(field.encode_name)
        default = msgspec.NODEFAULT if field.required else (later.decode(field.default) if later else field.default)
        typed.append((field.encode_name, later.type if later else field.type, default))
    episode = msgspec.defstruct("EpisodeLine", typed, kw_only=True, forbid_unknown_fields=True)
    lines, models = msgspec.json.schema_components((Header, episode), ref_template="#/$defs/{name}")
    models["EpisodeLine"]["description"] = "One episode of a checkpoint."
    models["EpisodeLine"]["properties"]["rollout_id"]["pattern"] = NAME_PATTERN
    # The end of a text is written otherwise in Python's patterns.
    described: dict[str, Any] = json.loads(json.dumps({"anyOf": lines, "$defs": models}).replace(r"\\Z", "$"))
    return described


def _line(name: str, **members: Any) -> Any:
    return create_model(
        name,
        __base__=_Strict,
        seq=(Annotated[int, Field(ge=1)], ...),
        synced=(_Count, ...),
        crc32c=(_Crc32c, ...),
        **members,
    )


def _event(kind: Any) -> type[BaseModel]:
    return create_model(
        kind.__name__,
        __base__=_Strict,
        __doc__=kind.__doc__,
        event=(cast(Any, Literal)[kind.event], ...),
        **dict(_members(kind)),
    )


def _members(kind: Any) -> Iterable[tuple[str, Any]]:
    """Name in JSON, and (type, default) for pydantic. What holds its default is not written, and a row is a payload."""
    hints = get_type_hints(kind)
    for spec in fields(kind):
        hint = hints[spec.name]
        if hint is EpisodeId:
            yield "rollout_id", (_RolloutId, ...)
            yield "attempt", (_Attempt, ...)
        elif hint is Source:
            yield "source", (_IN_JSON[Source], Field(alias="from"))
        elif spec.name != "row":
            default = ... if spec.default is MISSING else spec.default
            yield spec.name, (_IN_JSON.get(hint, hint), default)
