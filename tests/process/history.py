"""The history checker: what happened, told by journals, result files and the servers' audit logs alone.

It shares no code with the product: it reads bytes as `docs/format.md` describes them, so that an error in the product's
own reading cannot hide itself. A run is watched over its whole life: `observe` is called after every kill, since older
checkpoints are pruned; `check` is called at the end.
"""

import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import zstandard

Episode: TypeAlias = tuple[str, int]
"""(rollout_id, attempt)."""


MIN_EPISODES = 8
MIN_BOUNDARY = 2
FIRST_CALL = {"policy_model": 0, "workbench": 1}
"""How each server numbers its first audited call."""


def json_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """The JSON object in each whole line, whatever stands around it (sequence numbers, checksums)."""
    for line in data.split(b"\n")[:-1]:
        start, end = line.find(b"{"), line.rfind(b"}")
        if start >= 0:
            yield json.loads(line[start : end + 1])


def decompressed(path: Path) -> bytes:
    """Everything in all frames of a zstd file; a torn last frame gives what came before it."""
    with path.open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        out = io.BytesIO()
        try:
            while chunk := reader.read(1 << 20):
                out.write(chunk)
        except zstandard.ZstdError:
            pass
        return out.getvalue()


@dataclass(frozen=True)
class Position:
    """How far an episode was in a checkpoint: calls that its next attempt must not make again."""

    boundary: int
    model_calls: int
    tool_calls: int | None
    """None where no resources session was stored (its remaining steps need none)."""


def positions(checkpoint: Path) -> dict[Episode, Position]:
    """Every continued episode of one published checkpoint."""
    collection = json.loads((checkpoint / "collection.json").read_bytes())
    continued = {(entry["rollout_id"], entry["attempt"]) for entry in collection["continued"]}
    boundary: Counter[Episode] = Counter()
    turns: Counter[Episode] = Counter()
    tools: dict[Episode, int] = {}
    for kind in ("environment", "agent", "model", "resources"):
        for instance in (checkpoint / "gym" / kind).glob("*"):
            for episode, line, record in stored(instance):
                if line["boundary"] is not None:
                    boundary[episode] = max(boundary[episode], line["boundary"]["number"])
                if kind in ("environment", "agent"):
                    # Not the model's own count: a reply that arrived after the agent had closed is made again.
                    turns[episode] = max(turns[episode], line["turns"])
                if kind == "resources" and record["state"] is not None:
                    tools[episode] = record["state"]["calls"]
    return {episode: Position(boundary[episode], turns[episode], tools.get(episode)) for episode in continued}


def stored(participant: Path) -> Iterator[tuple[Episode, dict[str, Any], dict[str, Any]]]:
    """Episode, index line and head of its newest record, from one participant's directory."""
    manifest = json.loads((participant / "manifest.json").read_bytes())
    del manifest
    (index,) = participant.glob("episodes-*.jsonl.zst")
    head, *lines = json_lines(decompressed(index))
    segments = [segment["file"] for segment in head["segments"]]
    contents = {name: frames_of(participant / name) for name in segments}
    for line in lines:
        segment, frame, offset, length = line["parts"][-1]
        part = json.loads(contents[segments[segment]][frame][offset : offset + length])
        yield (line["rollout_id"], line["attempt"]), line, part.get("record") or part["head"]


def frames_of(path: Path) -> list[bytes]:
    """The content of each zstd frame of a file."""
    data, found = path.read_bytes(), []
    while data:
        reader = zstandard.ZstdDecompressor().decompressobj()
        found.append(reader.decompress(data))
        data = reader.unused_data
    return found


@dataclass
class History:
    """One run directory and the audit logs of its servers, watched from kill to kill."""

    run_directory: Path
    audits: dict[str, Path]
    checkpoints: dict[str, dict[Episode, Position]] = field(default_factory=dict)
    deaths: list[float] = field(default_factory=list)
    """Unix times at which a server alone was killed: what was in flight then is void, and a server that came back empty
    counts the calls of a void attempt from the beginning until it is retired."""

    def far_enough(self) -> bool:
        """Whether a published checkpoint lists enough episodes past their first boundaries to prove something."""
        self.observe()
        newest = self.checkpoints[max(self.checkpoints)] if self.checkpoints else {}
        return sum(position.boundary >= MIN_BOUNDARY for position in newest.values()) >= MIN_EPISODES

    def observe(self) -> None:
        """Remember every published checkpoint that stands now."""
        for checkpoint in (self.run_directory / "checkpoints").glob("ckpt-*"):
            if (checkpoint / "CHECKPOINT.json").exists() and checkpoint.name not in self.checkpoints:
                self.checkpoints[checkpoint.name] = positions(checkpoint)

    def journal(self, name: str) -> list[dict[str, Any]]:
        """Every event of one journal, in the order of its files."""
        found: list[dict[str, Any]] = []
        for path in sorted((self.run_directory / "journal").glob(f"{name}-*"), key=_numbers):
            if path.suffix == ".zst":
                lines = json_lines(decompressed(path))
            elif path.suffix == ".jsonl" and ".index" not in path.suffixes:
                lines = json_lines(path.read_bytes())
            else:
                continue
            found.extend(line["event"] for line in lines if "event" in line)
        return found

    def sources(self) -> dict[Episode, tuple[str, int] | None]:
        """Every attempt ever sent, with the checkpoint and attempt that it continues (None: from its input)."""
        found: dict[Episode, tuple[str, int] | None] = {}
        for event in self.journal("dispatch"):
            if event["event"] == "dispatched":
                origin = event["from"]
                found[_episode(event)] = None if origin == "input" else (origin["checkpoint_id"], origin["attempt"])
        return found

    def calls(self, server: str) -> dict[Episode, list[int]]:
        """Audited call indexes of each attempt at one server, in the order they were made."""
        found: dict[Episode, list[int]] = defaultdict(list)
        path = self.audits[server]
        for line in json_lines(path.read_bytes() if path.exists() else b""):
            if line["rollout_id"] is not None:
                found[line["rollout_id"], line["attempt"]].append(line["call"])
        return found

    def calls_that_counted(self, server: str) -> Counter[tuple[int, ...]]:
        """Audited calls per (task, repeat) that the last attempt stands on: its own, and those of the attempts it
        continues up to the boundaries it continues from. What a crash lost is left out."""
        sources, calls = self.sources(), self.calls(server)
        last = {rollout: max(a for r, a in sources if r == rollout) for rollout, _ in sources}
        found: Counter[tuple[int, ...]] = Counter()
        for rollout, attempt in last.items():
            key = tuple(int(number) for number in rollout.split("-")[1:])
            limit = None
            while True:
                made = calls.get((rollout, attempt), [])
                found[key] += len([call for call in made if limit is None or call < limit + FIRST_CALL[server]])
                source = sources[rollout, attempt]
                if source is None:
                    break
                position = self.checkpoints[source[0]][rollout, source[1]]
                done = position.model_calls if server == "policy_model" else position.tool_calls
                limit = done if limit is None or (done is not None and done < limit) else limit
                attempt = source[1]
        return found

    def check(self) -> int:
        """Assert every promise that these files can prove; gives the number of restored attempts."""
        outcomes = Counter(event["rollout_id"] for event in self.journal("outcomes") if event.get("final", True))
        assert not [rollout for rollout, count in outcomes.items() if count > 1], "a rollout has two outcomes"
        sources = self.sources()
        restored = 0
        for episode, source in sources.items():
            if source is None:
                continue
            checkpoint_id, attempt = source
            assert checkpoint_id in self.checkpoints, f"{episode} continues {checkpoint_id}, which was never published"
            position = self.checkpoints[checkpoint_id].get((episode[0], attempt))
            assert position is not None, f"{episode} continues {source}, which {checkpoint_id} does not list"
            assert episode[1] > attempt, f"{episode} is not later than the attempt it continues"
            restored += 1
            self._check_continuation(episode, position)
        return restored

    def _before_a_death(self, server: str, episode: Episode) -> list[int]:
        """Audited call indexes of an attempt up to the first death of a server under it."""
        if not self.deaths:
            return self.calls(server).get(episode, [])
        made: list[int] = []
        ends = None
        for line in json_lines(self.audits[server].read_bytes()):
            if (line["rollout_id"], line["attempt"]) != episode:
                continue
            if ends is None:
                ends = min((death for death in self.deaths if death >= line["t"]), default=float("inf"))
            if line["t"] <= ends:
                made.append(line["call"])
        return made

    def _check_continuation(self, episode: Episode, position: Position) -> None:
        """The first calls of a restored attempt come right after its boundary, and none at or before it recurs."""
        expected = {"policy_model": position.model_calls, "workbench": position.tool_calls}
        for server, done in expected.items():
            if server not in self.audits or done is None:
                continue
            made = self._before_a_death(server, episode)
            assert not made or made[0] == done + FIRST_CALL[server], f"{episode}: {server} call {made[0]} after {done}"
            assert made == sorted(set(made)), f"{episode} repeated a {server} call: {made}"


def _episode(event: dict[str, Any]) -> Episode:
    return event["rollout_id"], event["attempt"]


def _numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


VOLATILE = re.compile(
    r"^(?:.*\.)?(?:id|call_id|previous_response_id|created_at|completed_at|_ng_rollout_id|_ng_attempt_index|ng_perf)$"
)
"""Names of fields that may differ between an interrupted run and an undisturbed one: ids of responses, messages and
calls, timestamps, durations, and the run prefix and attempt inside `_ng_rollout_id` and `_ng_attempt_index`."""


def steady(value: Any) -> Any:
    """A row without its volatile fields."""
    if isinstance(value, dict):
        return {name: steady(inner) for name, inner in value.items() if not VOLATILE.match(name)}
    if isinstance(value, list):
        return [steady(inner) for inner in value]
    return value


def outcomes(rows: list[dict[str, Any]]) -> dict[tuple[int, int], Any]:
    """Rows by (task, repeat), without what is volatile; each may stand there once."""
    found: dict[tuple[int, int], Any] = {}
    for row in rows:
        key = row["_ng_task_index"], row["_ng_rollout_index"]
        assert key not in found, f"task {key[0]}, repeat {key[1]} has two rows"
        found[key] = steady(row)
    return found
