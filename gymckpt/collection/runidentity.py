"""What makes two runs the same run: the digest over everything that changes what the results mean."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gymckpt import jsoncodec
from gymckpt.collection.settings import CollectSettings, scope_of
from gymckpt.errors import NotAsAsked, UsageError

PROTOCOL = 1
"""Rises when rollouts mean something else although no setting changed, for example in how seeds of repeats are made."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of the identity whose value is not the run's."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: the run has {_shown(self.old)}, now {_shown(self.new)}"


def run_identity(settings: CollectSettings, input_sha256: str) -> dict[str, Any]:
    """The identity by field. `tasks` is what the rows say, not what their file is called."""
    names = [name for name in CollectSettings.model_fields if scope_of(name) == "identity"]
    fields = settings.model_dump(mode="json", include=set(names))
    return {**fields, "tasks": input_sha256, "protocol": PROTOCOL}


def digest(identity: Mapping[str, Any]) -> str:
    """sha256 over the identity's canonical JSON."""
    return hashlib.sha256(jsoncodec.canonical(dict(identity))).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Every field in which the two identities differ."""
    return [
        Difference(name, old.get(name), new.get(name))
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def check_identity(old: Mapping[str, Any], new: Mapping[str, Any], accepted: tuple[str, ...] = ()) -> list[Difference]:
    """The differences that the user accepted; raises `NotAsAsked` naming every other one, `UsageError` for a name that
    is no field of the identity."""
    check_accepted(accepted, {**old, **new})
    found = differences(old, new)
    refused = [difference for difference in found if difference.name not in accepted]
    if refused:
        raise NotAsAsked(
            "this directory holds another run:\n" + "\n".join(f"  {difference}" for difference in refused),
            hint="use another --run-dir, or --accept-change FIELD for each field that may differ",
        )
    return found


def check_accepted(accepted: Iterable[str], identity: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a name that is no field of the identity."""
    for name in accepted:
        if name not in identity:
            known = ", ".join(sorted(identity))
            raise UsageError(f"--accept-change {name}: no such field", hint=f"the fields are {known}")


def _shown(value: Any) -> str:
    text = jsoncodec.dumps(value).decode()
    return text if len(text) <= 100 else text[:97] + "..."
