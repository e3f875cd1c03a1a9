"""What the journals say: every event of a run as a frozen dataclass, and its JSON.

Three journals, each append-only: `dispatch` (which attempt was sent where), `outcomes` (what became of attempts, with
the rows), `events` (everything else). No order *between* journals is relied on: an outcome names the `opening` it
belongs to, so that `reopened` needs no place among the outcomes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeAlias, cast, get_args

from gymckpt.errors import DamagedState
from gymckpt.identity import EpisodeId

OutcomeKind: TypeAlias = Literal["succeeded", "failed", "omitted"]
JournalName: TypeAlias = Literal["dispatch", "outcomes", "events"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where an attempt starts: a checkpoint and the attempt recorded there, or the input (both None)."""

    checkpoint_id: str | None = None
    attempt: int | None = None

    @property
    def is_input(self) -> bool:
        return self.checkpoint_id is None

    def to_json(self) -> Any:
        return "input" if self.is_input else {"checkpoint_id": self.checkpoint_id, "attempt": self.attempt}

    @classmethod
    def from_json(cls, value: Any) -> "Source":
        return cls() if value == "input" else cls(str(value["checkpoint_id"]), int(value["attempt"]))


FROM_INPUT = Source()


@dataclass(frozen=True, slots=True)
class Install:
    """One line of a restore's intent: the attempt in the checkpoint, and the attempt that it becomes."""

    rollout_id: str
    recorded: int
    installed: int


@dataclass(frozen=True, slots=True)
class _Event:
    """An event of a journal; its JSON is its fields, with the name of the event in `event`."""

    event: ClassVar[str]
    journal: ClassVar[JournalName] = "events"


@dataclass(frozen=True, slots=True)
class EpochBegun(_Event):
    """A new holder took the run. Beyond the lengths in `files`, nothing in an older epoch's file counts."""

    event: ClassVar[str] = "epoch"
    epoch: int
    holder: str
    files: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dispatched(_Event):
    """Durable before its request leaves."""

    event: ClassVar[str] = "dispatched"
    journal: ClassVar[JournalName] = "dispatch"
    episode: EpisodeId
    owner: str
    source: Source = FROM_INPUT


@dataclass(frozen=True, slots=True)
class Outcome(_Event):
    """What became of an attempt. Only a `final` one is the outcome of its rollout; a failed attempt that will be
    followed by another is recorded with `final` false. `row` is the payload: a row of rollouts.jsonl or of
    failures.jsonl, None where there is none to keep."""

    event: ClassVar[str] = "outcome"
    journal: ClassVar[JournalName] = "outcomes"
    episode: EpisodeId
    outcome: OutcomeKind
    final: bool = True
    kind: str | None = None
    stage: str | None = None
    terminal: bool = False
    reward: float | None = None
    opening: int = 0
    row: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Replied(_Event):
    """A member of a cohort answered; it counts when the whole cohort has."""

    event: ClassVar[str] = "replied"
    episode: EpisodeId
    cohort: str


@dataclass(frozen=True, slots=True)
class RetirePending(_Event):
    """These attempts must be retired everywhere before a next one may be sent."""

    event: ClassVar[str] = "retire_pending"
    episodes: tuple[EpisodeId, ...]


@dataclass(frozen=True, slots=True)
class Retired(_Event):
    """These attempts were retired everywhere. `forgotten`: their rollouts have ended and hold nothing on any server."""

    event: ClassVar[str] = "retired"
    episodes: tuple[EpisodeId, ...]
    forgotten: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointBegun(_Event):
    """An id is taken, for a checkpoint or a restore; durable before any server hears it."""

    event: ClassVar[str] = "checkpoint_begun"
    checkpoint_id: str
    restore: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointPublished(_Event):
    """The checkpoint stands. Sizes are over all participants, times are of this checkpoint."""

    event: ClassVar[str] = "checkpoint_published"
    checkpoint_id: str
    episodes: int = 0
    restarts: int = 0
    size_bytes: int = 0
    pause_s: float = 0.0
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckpointFailed(_Event):
    """The checkpoint published nothing and is resumed everywhere."""

    event: ClassVar[str] = "checkpoint_failed"
    checkpoint_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointsRemoved(_Event):
    """These were published and are not needed any more; durable before they are removed, wherever there is space."""

    event: ClassVar[str] = "checkpoints_removed"
    checkpoint_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckpointNamed(_Event):
    """Answers a request file: this checkpoint bears the user's name and is never pruned."""

    event: ClassVar[str] = "checkpoint_named"
    checkpoint_id: str
    name: str
    request: str


@dataclass(frozen=True, slots=True)
class RequestFailed(_Event):
    """Answers a request file: no checkpoint was taken for it."""

    event: ClassVar[str] = "request_failed"
    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreIntended(_Event):
    """Durable before a server is told to restore: which checkpoint, and what becomes of each rollout in it."""

    event: ClassVar[str] = "restore_intended"
    restore_id: str
    checkpoint_id: str
    installs: tuple[Install, ...]


@dataclass(frozen=True, slots=True)
class Restored(_Event):
    """All of the intent is installed everywhere, and every server is open again."""

    event: ClassVar[str] = "restored"
    restore_id: str
    checkpoint_id: str


@dataclass(frozen=True, slots=True)
class RestoreFailed(_Event):
    """The restore activated nothing; the attempts it named are used up and retired."""

    event: ClassVar[str] = "restore_failed"
    restore_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Voided(_Event):
    """These attempts lost a server under them: never a result, never a failure of the rollout."""

    event: ClassVar[str] = "voided"
    episodes: tuple[EpisodeId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Reopened(_Event):
    """By the user: outcomes of the rollout in earlier openings no longer count. `attempt` is the last one used."""

    event: ClassVar[str] = "reopened"
    rollout_id: str
    opening: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class IdentityChanged(_Event):
    """By the user: this field of the run's identity has a new value from here on."""

    event: ClassVar[str] = "identity_changed"
    name: str
    old: Any
    new: Any


@dataclass(frozen=True, slots=True)
class RowsWritten(_Event):
    """Outcomes up to `outcomes` (a position of that journal) are in the result files, which are durable up to here."""

    event: ClassVar[str] = "rows_written"
    outcomes: int
    rollouts_bytes: int
    failures_bytes: int


@dataclass(frozen=True, slots=True)
class Finished(_Event):
    """A collector came to its end, with these counts."""

    event: ClassVar[str] = "finished"
    exit_code: int
    planned: int
    succeeded: int
    failed: int
    omitted: int
    unresolved: int


Event: TypeAlias = (
    EpochBegun
    | Dispatched
    | Outcome
    | Replied
    | RetirePending
    | Retired
    | CheckpointBegun
    | CheckpointPublished
    | CheckpointFailed
    | CheckpointsRemoved
    | CheckpointNamed
    | RequestFailed
    | RestoreIntended
    | Restored
    | RestoreFailed
    | Voided
    | Reopened
    | IdentityChanged
    | RowsWritten
    | Finished
)

EVENTS: dict[str, type[_Event]] = {kind.event: kind for kind in cast(tuple[type[_Event], ...], get_args(Event))}
"""By the name in JSON."""


def _read_episodes(line: Mapping[str, Any]) -> Any:
    found = line["episodes"]
    if not isinstance(found, list):  # a count, in `CheckpointPublished`
        return found
    return tuple(EpisodeId(str(rollout_id), int(attempt)) for rollout_id, attempt in found)


_KEYS = {"episode": "rollout_id", "source": "from"}
_READERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "episode": lambda line: EpisodeId(str(line["rollout_id"]), int(line["attempt"])),
    "source": lambda line: Source.from_json(line["from"]),
    "episodes": _read_episodes,
    "checkpoint_ids": lambda line: tuple(str(checkpoint_id) for checkpoint_id in line["checkpoint_ids"]),
    "installs": lambda line: tuple(Install(str(who), int(old), int(new)) for who, old, new in line["installs"]),
}
_FIELDS = {kind: tuple((spec.name, spec.default) for spec in fields(kind)) for kind in EVENTS.values()}
"""Names and defaults (`MISSING`, which nothing equals, for none) of each."""
_READ = {
    kind: tuple((name, _KEYS.get(name, name), _READERS.get(name)) for name, _ in named)
    for kind, named in _FIELDS.items()
}
"""Names, keys in JSON, and how to read what is not read as it is."""


def to_json(event: Event) -> dict[str, Any]:
    """The event as a journal stores it; fields that hold their default are left out, and so is a row, a payload."""
    line: dict[str, Any] = {"event": event.event}
    for name, default in _FIELDS[type(event)]:
        value = getattr(event, name)
        if name == "episode":
            line["rollout_id"], line["attempt"] = value
        elif name == "source":
            line["from"] = value.to_json()
        elif value != default and name != "row":
            line[name] = _plain(value)
    return line


def from_json(line: Mapping[str, Any]) -> Event | None:
    """The event in a journal's line; None for an event of a later version; raises `DamagedState` on a wrong field."""
    kind = EVENTS.get(str(line.get("event")))
    if kind is None:
        return None
    try:
        held = {name: read(line) if read else line[key] for name, key, read in _READ[kind] if key in line}
        return cast(Event, kind(**held))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedState(f"a journal holds an event {kind.event!r} that cannot be read: {error!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Install):
        return [value.rollout_id, value.recorded, value.installed]
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
