"""The run directory: the names in it, what it holds when it is opened, and run.json."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

from gymckpt import __version__, jsoncodec
from gymckpt.collection import runidentity
from gymckpt.collection.planfile import PlanSummary
from gymckpt.errors import DamagedState, NotAsAsked, UsageError
from gymckpt.ports import FileSystem
from gymckpt.storage.durable import exists, is_temporary, read_small, remove_quietly, remove_tree, write_new
from gymckpt.storage.sealing import seal, unseal

FORMAT = 1
MAX_RUN_JSON_BYTES = 16 << 20

Holding: TypeAlias = Literal["nothing", "begun", "run"]
"""`nothing`: absent, empty, or what a creation that was interrupted left. `begun`: no run.json, yet work was recorded.
`run`: a run."""

_OURS = frozenset(
    {
        "run.json",
        "plan.jsonl.zst",
        "plan.jsonl.zst.spool",
        "journal",
        "checkpoints",
        "LATEST",
        "LOCK",
        "LOCK.held",
        "HEARTBEAT",
        "rollouts.jsonl",
        "failures.jsonl",
        "aggregate_metrics.json",
        "servers",
        "requests",
    }
)


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Every name in a run directory; all are below `root`, which may be moved as a whole."""

    root: PurePath

    @property
    def run_json(self) -> PurePath:
        return self.root / "run.json"

    @property
    def plan(self) -> PurePath:
        return self.root / "plan.jsonl.zst"

    @property
    def journal(self) -> PurePath:
        return self.root / "journal"

    @property
    def checkpoints(self) -> PurePath:
        return self.root / "checkpoints"

    @property
    def lock(self) -> PurePath:
        """Who holds the run: written at each taking, never by a heartbeat."""
        return self.root / "LOCK"

    @property
    def held(self) -> PurePath:
        """The file whose operating system lock the holder keeps."""
        return self.root / "LOCK.held"

    @property
    def heartbeat(self) -> PurePath:
        return self.root / "HEARTBEAT"

    @property
    def rollouts(self) -> PurePath:
        return self.root / "rollouts.jsonl"

    @property
    def failures(self) -> PurePath:
        return self.root / "failures.jsonl"

    @property
    def aggregate_metrics(self) -> PurePath:
        """What the servers themselves make of all results."""
        return self.root / "aggregate_metrics.json"

    @property
    def servers(self) -> PurePath:
        """Logs of embedded servers."""
        return self.root / "servers"

    @property
    def requests(self) -> PurePath:
        """Requests for named checkpoints, one file each."""
        return self.root / "requests"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What run.json says."""

    run_id: str
    created_at: float
    identity: Mapping[str, Any]
    plan: PlanSummary
    owners: tuple[str, ...]
    largest_cohort: int
    settings: Mapping[str, Any]
    version: str = __version__

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": self.version,
            "run_id": self.run_id,
            "created_at": self.created_at,
            "identity": dict(self.identity),
            "identity_sha256": runidentity.digest(self.identity),
            "plan": asdict(self.plan),
            "owners": list(self.owners),
            "largest_cohort": self.largest_cohort,
            "settings": dict(self.settings),
        }


def write_run(fs: FileSystem, paths: RunPaths, record: RunRecord) -> None:
    """Make the directory a run: the last step of its creation. Blocking."""
    write_new(fs, paths.run_json, seal(record.to_json()))


def read_run(fs: FileSystem, paths: RunPaths) -> RunRecord:
    """What run.json says. Blocking. Raises `UsageError` where there is none, `NotAsAsked` where it is of a later
    version or the directory is one checkpoint alone, `DamagedState` where it cannot be believed."""
    if exists(fs, paths.run_json) is None:
        if looks_like_checkpoint(fs, paths.root):
            raise NotAsAsked(
                f"{paths.root} is one checkpoint without its run: it can be inspected and verified, not continued",
                hint="give the run directory that holds it",
            )
        raise UsageError(f"{paths.root} holds no run (no run.json)", hint="start one with: gymckpt collect")
    try:
        data = read_small(fs, paths.run_json, MAX_RUN_JSON_BYTES)
        value = jsoncodec.loads(data)
        version = value["format"]
        if isinstance(version, int) and version > FORMAT:
            raise NotAsAsked(
                f"{paths.run_json} is of format {version}; this gymckpt reads up to {FORMAT}",
                hint="use a newer gymckpt",
            )
        if version != FORMAT:
            raise DamagedState(f"{paths.run_json}: format {version!r} was never written by any version")
        value = unseal(data, str(paths.run_json))
        if runidentity.digest(value["identity"]) != value["identity_sha256"]:
            raise DamagedState(f"{paths.run_json}: the identity does not match its digest")
        return RunRecord(
            run_id=_hex(value["run_id"]),
            created_at=float(value["created_at"]),
            identity=dict(value["identity"]),
            plan=PlanSummary(**value["plan"]),
            owners=tuple(value["owners"]),
            largest_cohort=int(value["largest_cohort"]),
            settings=dict(value["settings"]),
            version=str(value["version"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedState(f"{paths.run_json} cannot be read: {error!r}") from error


def _hex(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{32}", value):
        raise ValueError(f"run_id {value!r}")
    return value


def holding(fs: FileSystem, paths: RunPaths) -> Holding:
    """What the directory holds. Blocking. Raises `UsageError` where there are files that are not a run's."""
    entry = exists(fs, paths.root)
    if entry is None:
        return "nothing"
    if entry.kind != "directory":
        raise UsageError(f"{paths.root} is not a directory", hint="give another --run-dir")
    names = [found.name for found in fs.scan(paths.root) if not is_temporary(found.name)]
    if foreign := sorted(set(names) - _OURS):
        shown = ", ".join(foreign[:5])
        raise UsageError(f"{paths.root} holds files that are not a run's ({shown})", hint="give an empty --run-dir")
    if "run.json" in names:
        return "run"
    return "begun" if _work_recorded(fs, paths) else "nothing"


def _work_recorded(fs: FileSystem, paths: RunPaths) -> bool:
    journals = fs.scan(paths.journal) if exists(fs, paths.journal) else []
    if any(file.size_bytes and file.name.startswith(("dispatch-", "outcomes-")) for file in journals):
        return True
    checkpoints = fs.scan(paths.checkpoints) if exists(fs, paths.checkpoints) else []
    return any(entry.kind == "directory" for entry in checkpoints)


def clear_creation(fs: FileSystem, paths: RunPaths) -> None:
    """Remove what an interrupted creation left; only where `holding` says `nothing`. Blocking."""
    for path in (paths.plan, paths.plan.with_name(paths.plan.name + ".spool")):
        remove_quietly(fs, path)
    for entry in fs.scan(paths.root):
        if is_temporary(entry.name):
            remove_quietly(fs, paths.root / entry.name)


def delete_run(fs: FileSystem, paths: RunPaths) -> None:
    """Remove a run on the user's explicit word, run.json first, so that a half-deleted run is none. Blocking."""
    remove_quietly(fs, paths.run_json)
    fs.fsync_directory(paths.root)
    for path in (paths.checkpoints, paths.journal, paths.requests):
        if exists(fs, path):
            remove_tree(fs, path)
    for path in (paths.root / "LATEST", paths.rollouts, paths.failures, paths.aggregate_metrics):
        remove_quietly(fs, path)
    clear_creation(fs, paths)
    fs.fsync_directory(paths.root)


def looks_like_checkpoint(fs: FileSystem, path: PurePath) -> bool:
    """Whether `path` is one checkpoint of a run."""
    return exists(fs, path / "CHECKPOINT.json") is not None


def split_checkpoint(fs: FileSystem, path: PurePath) -> tuple[RunPaths, str | None]:
    """The run and, where `path` is one checkpoint inside it, that checkpoint's id. Blocking."""
    run = path.parent.parent
    if looks_like_checkpoint(fs, path) and path.parent.name == "checkpoints" and exists(fs, run / "run.json"):
        return RunPaths(run), path.name
    return RunPaths(path), None
