"""Large runs: what a resume reads, and what memory holds."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import pytest

from gymckpt import jsoncodec
from gymckpt.collection import collector, events
from gymckpt.collection.inputs import TaskInput
from gymckpt.collection.opening import Opener, Ports
from gymckpt.collection.routing import Server
from gymckpt.collection.settings import CollectSettings
from gymckpt.collection.signals import Wishes
from gymckpt.coordination import Deployment
from gymckpt.identity import EpisodeId
from gymckpt.ports import SystemClock, ThreadOffload
from gymckpt.storage.files import LocalFileSystem
from tests.collection.deployments import ENVIRONMENT, PlainEnvironment, typed_row
from tests.simulation.transport import MemoryNetwork

PAYLOAD_BYTES = 4000
SERVERS = (Server(ENVIRONMENT),)


class CountingFiles(LocalFileSystem):
    """Counts bytes read by file name."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes: Counter[str] = Counter()

    def read(self, path: PurePath, offset: int = 0, length: int = -1) -> bytes:
        data = super().read(path, offset, length)
        self.read_bytes[path.name] += len(data)
        return data


def ports(fs: LocalFileSystem) -> Ports:
    network = MemoryNetwork()
    network.serve(ENVIRONMENT, PlainEnvironment())
    return Ports(SystemClock(), fs, ThreadOffload(), network, network)


async def build(root: Path, planned: int, finished: int) -> None:
    """A run of which `finished` rollouts have an outcome and a row, as a killed collector leaves it."""
    edges = ports(LocalFileSystem())
    source = TaskInput("rows", lambda: (jsoncodec.dumps(typed_row(n)) + b"\n" for n in range(planned)))
    opener = Opener(CollectSettings(tasks="rows"), root, edges, lambda: False)
    await opener.holds_run(restore=False)
    opened = await opener.create(SERVERS, Deployment(()), source)
    row = {"reward": 1.0, "response": "r" * PAYLOAD_BYTES}
    line = jsoncodec.dumps(row) + b"\n"

    async def finish(task: int) -> int:
        episode = EpisodeId(opened.run.rollout_id(task, 0))
        await opened.journals.append(events.Dispatched(episode, ENVIRONMENT.instance))
        return await opened.journals.append(events.Outcome(episode, "succeeded", reward=1.0, row=row))

    last = 0
    for begin in range(0, finished, 2000):
        last = max(await asyncio.gather(*(finish(task) for task in range(begin, min(finished, begin + 2000)))))
    with (root / "rollouts.jsonl").open("wb") as results:
        for _ in range(finished):
            results.write(line)
    (root / "failures.jsonl").write_bytes(b"")
    await opened.journals.append(events.RowsWritten(last, len(line) * finished, 0))
    await opened.journals.close()
    await opener.lock.release()


def resident_kib() -> int:
    """The most memory this process ever held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def begin(root: Path, planned: int, finished: int) -> dict[str, Any]:
    """Begin a run of `planned` rows and stop it once `finished` rollouts have an outcome."""
    wishes = Wishes()
    seen = 0

    def count(event: Mapping[str, Any]) -> None:
        nonlocal seen
        seen += event["event"] == "outcome"
        if seen >= finished:
            wishes.ask_to_stop()

    rows = TaskInput("rows", lambda: (jsoncodec.dumps(typed_row(n)) + b"\n" for n in range(planned)))
    settings = CollectSettings(tasks="rows", grace=2.0)
    running = collector.collect(
        settings, root, SERVERS, ports(LocalFileSystem()), on_event=count, wishes=wishes, source=rows
    )
    summary = asyncio.run(running)
    return {"planned": summary.counts.planned, "exit_code": summary.exit_code, "resident_kib": resident_kib()}


def in_a_process_of_its_own(call: str) -> dict[str, Any]:
    """What a function of this module gives, called where nothing else holds memory."""
    script = f"import json; from {__name__} import *; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def restore(root: Path) -> dict[str, Any]:
    """Go on with the run; what was read, by file name, and the memory it took."""
    fs = CountingFiles()
    summary = asyncio.run(collector.restore(CollectSettings(), root, SERVERS, ports(fs)))
    return {"succeeded": summary.counts.succeeded, "read": fs.read_bytes, "resident_kib": resident_kib()}


def resume_reads_indexes_only(root: Path, planned: int, finished: int) -> int:
    """Build a run, resume it in a process of its own, and check what was read; gives the KiB that process held."""
    asyncio.run(build(root, planned, finished))
    resumed = in_a_process_of_its_own(f"restore(Path({str(root)!r}))")
    assert resumed["succeeded"] == planned
    read = Counter(resumed["read"])
    payloads = sum(count for name, count in read.items() if name.startswith("outcomes-") and name.endswith(".zst"))
    indexes = sum(count for name, count in read.items() if name.startswith("outcomes-") and "index" in name)
    assert payloads < 64 << 10
    assert read["rollouts.jsonl"] == 0
    assert indexes < 4 * 250 * finished
    assert sum(read.values()) < 2000 * finished < PAYLOAD_BYTES * finished
    with (root / "rollouts.jsonl").open("rb") as results:
        assert sum(1 for _ in results) == planned
    return int(resumed["resident_kib"])


def test_a_resume_reads_indexes_and_no_payloads(tmp_path: Path) -> None:
    resume_reads_indexes_only(tmp_path / "run", 2010, 2000)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_resume_of_200_000_finished_rollouts_reads_indexes_and_holds_little(tmp_path: Path) -> None:
    assert resume_reads_indexes_only(tmp_path / "run", 200_010, 200_000) < 500 << 10


def memory_is_flat_in_the_plan(root: Path, few: int, many: int, finished: int, more_kib: int) -> None:
    """A run of `many` planned rows holds at most `more_kib` more than one of `few`."""
    held = []
    for planned in (few, many):
        begun = in_a_process_of_its_own(f"begin(Path({str(root / str(planned))!r}), {planned}, {finished})")
        assert (begun["planned"], begun["exit_code"]) == (planned, 75)
        held.append(begun["resident_kib"])
    assert held[1] - held[0] < more_kib, held


def test_memory_grows_with_rollouts_in_flight_and_not_with_the_plan(tmp_path: Path) -> None:
    memory_is_flat_in_the_plan(tmp_path, 1000, 20_000, 200, 16 << 10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_of_a_million_planned_rows_holds_memory_flat(tmp_path: Path) -> None:
    memory_is_flat_in_the_plan(tmp_path, 20_000, 1_000_000, 2000, 32 << 10)
