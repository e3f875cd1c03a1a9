"""The worked examples of `docs/format.md`, by the code itself. `python -m tests.storage.examples` renews them."""

import asyncio
import json
import re
from pathlib import Path, PurePath
from typing import Any

import zstandard

from gymckpt.identity import EpisodeId, Kind
from gymckpt.storage.checkpoints import Collection, Restarted
from gymckpt.storage.journal import Journal
from gymckpt.storage.outcomes import OutcomesJournal
from gymckpt.storage.published import CHECKPOINT, COLLECTION
from gymckpt.storage.records import Boundary, ExportedRecord
from gymckpt.storage.writer import ParticipantWriter
from tests.simulation.files import MemoryFileSystem
from tests.storage.building import INLINE, ROOT, RUN, RUN_ID, checkpoint_id, directory, memory

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
_BLOCK = re.compile(r"(<!-- example: ([a-z-]+) -->\n```[a-z]*\n)(.*?)(```\n<!-- end -->)", re.DOTALL)
EPISODE = {"rollout_id": "01234567-4-0", "attempt": 0}
ROLLOUT = "01234567-4-0"


def environment() -> ExportedRecord:
    state = {"response": None, "cookies": {"resources": {"Workbench___workbench": "eyJ0Ijo..."}}, "verify": "wait"}
    boundary = {"step": "invoke_agent", "number": 1, "at": 1790000000.25, "state": state}
    record = {"episode_id": EPISODE, "task_digest": "7b1f...", "boundary": boundary}
    needs: tuple[tuple[Kind, str], ...] = (("agent", "agent"), ("resources", "workbench"))
    return ExportedRecord(EpisodeId(ROLLOUT), record, Boundary("invoke_agent", 1, 1790000000.25), 0, needs, 1)


def agent(outputs: int) -> ExportedRecord:
    calls: list[dict[str, Any]] = [
        {"type": "function_call", "name": "add_note", "arguments": '{"text": "milk"}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "noted"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
    ]
    state = {"step": outputs // 2, "pending_tools": False, "outputs": calls, "usage": {"total_tokens": 90 * outputs}}
    boundary = {"step": "invoke_agent", "number": outputs, "at": 1790000000.5, "state": state}
    record = {"episode_id": EPISODE, "session_key": "5e55", "session": {"tools": ["add_note"]}, "boundary": boundary}
    return ExportedRecord(
        EpisodeId(ROLLOUT),
        record,
        Boundary("invoke_agent", outputs, 1790000000.5),
        outputs // 2,
        (("model", "policy_model"),),
        outputs,
        {"/boundary/state/outputs": outputs},
    )


def resources() -> ExportedRecord:
    record = {"episode_id": EPISODE, "session_id": "9d0c", "state": {"notes": ["milk"], "seed": 11}}
    return ExportedRecord(EpisodeId(ROLLOUT), record, revision=4)


def model() -> ExportedRecord:
    row = {"call_id": "k1", "parent": None, "response_id": "resp_1", "prompt_tokens": 80, "completion_tokens": 10}
    record = {"episode_id": EPISODE, "rows": [row], "generation_cuts": []}
    return ExportedRecord(EpisodeId(ROLLOUT), record, turns=1, revision=1, lists={"/rows": 1})


async def build() -> MemoryFileSystem:
    """Two checkpoints of a small run, and its journals."""
    fs = memory()
    parts: list[tuple[Kind, str, list[ExportedRecord]]] = [
        ("environment", "environment", [environment(), environment()]),
        ("agent", "agent", [agent(1), agent(3)]),
        ("resources", "workbench", [resources(), resources()]),
        ("model", "policy_model", [model(), model()]),
    ]
    bases: dict[str, Any] = {}
    journal = Journal(fs, INLINE, RUN / "journal", "dispatch", epoch=1)
    await journal.open()
    await journal.append({"type": "dispatched", "rollout_id": ROLLOUT, "attempt": 0, "from": "input"})
    for sequence in (1, 2):
        path = await directory(fs).begin(checkpoint_id(sequence))
        for kind, instance, states in parts:
            writer = ParticipantWriter(
                fs,
                INLINE,
                path / "gym" / kind / instance,
                checkpoint_id=checkpoint_id(sequence),
                kind=kind,
                instance=instance,
                base=bases.get(kind),
            )
            await writer.add(states[sequence - 1])
            bases[kind] = (await writer.finish()).base
        await directory(fs).publish(
            checkpoint_id(sequence),
            Collection(
                checkpoint_id(sequence),
                RUN_ID,
                sequence,
                1,
                1790000001.0,
                [EpisodeId(ROLLOUT)],
                [Restarted(EpisodeId("01234567-9-0"), "no_boundary")],
                {"dispatch": journal.position},
            ),
        )
    outcomes = OutcomesJournal(fs, INLINE, RUN / "journal", "outcomes", epoch=1)
    await outcomes.open()
    await outcomes.append({"type": "succeeded", "rollout_id": ROLLOUT, "attempt": 0}, {"reward": 1.0})
    await outcomes.close()
    return fs


def lines_of(fs: MemoryFileSystem, place: PurePath, prefix: str) -> str:
    """What `zstd -dc <place>/<prefix>*` prints."""
    found = []
    for entry in fs.scan(place):
        if entry.name.startswith(prefix):
            data = fs.read(place / entry.name)
            with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as stream:
                found.append(stream.read().decode())
    return "".join(found)


def pretty(data: bytes) -> str:
    return json.dumps(json.loads(data), indent=2) + "\n"


def examples() -> dict[str, str]:
    """Every example by its name."""
    fs = asyncio.run(build())
    path = ROOT / checkpoint_id(2)
    found = {
        "manifest": pretty(fs.read(path / "gym" / "agent" / "agent" / "manifest.json")),
        "index": lines_of(fs, path / "gym" / "agent" / "agent", "episodes"),
        "checkpoint": pretty(fs.read(path / CHECKPOINT)),
        "collection": pretty(fs.read(path / COLLECTION)),
        "journal": fs.read(RUN / "journal" / "dispatch-000001-0001.jsonl").decode(),
        "outcomes": lines_of(fs, RUN / "journal", "outcomes-000001-0001.jsonl.zst"),
        "outcomes-index": fs.read(RUN / "journal" / "outcomes-000001-0001.index.jsonl").decode(),
    }
    for kind, instance in (
        ("environment", "environment"),
        ("agent", "agent"),
        ("resources", "workbench"),
        ("model", "policy_model"),
    ):
        lines = lines_of(fs, path / "gym" / kind / instance, "segment").splitlines(keepends=True)
        found[kind] = "".join(sorted(lines, key=lambda line: int(json.loads(line)["part"])))
    return found


def stable(text: str) -> str:
    """`text` without what depends on the version of zstd: digests, compressed sizes, checksums over these."""
    text = re.sub(r"[0-9a-f]{64}", "<digest>", text)
    text = re.sub(r'("(?:size_)?bytes": ?)[0-9]+', r"\1<bytes>", text)
    text = re.sub(r'("crc32c":")[0-9a-f]{8}', r"\1<crc>", text)
    text = re.sub(r'("at":\[[0-9]+,)[0-9]+', r"\1<bytes>", text)
    return re.sub(r"\[\s*[0-9]+,\s*([0-9]+)\s*\](?=[\],\s])", r"[<bytes>, \1]", text)


def renewed(document: str) -> str:
    """`document` with every example as the code writes it now."""
    found = examples()
    return _BLOCK.sub(lambda block: block[1] + found[block[2]] + block[4], document)


def named(document: str) -> set[str]:
    """The examples that `document` shows."""
    return {block[2] for block in _BLOCK.finditer(document)}


if __name__ == "__main__":
    DOCUMENT.write_text(renewed(DOCUMENT.read_text()))
