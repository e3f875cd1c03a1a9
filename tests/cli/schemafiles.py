"""Real files against the published schemas."""

import fnmatch
import importlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

from gymckpt import jsoncodec

jsonschema: Any = importlib.import_module("jsonschema")

SCHEMAS = Path(__file__).resolve().parents[2] / "schemas"
WHOLE = {
    "run.json": "file-run",
    "checkpoints/*/CHECKPOINT.json": "file-checkpoint",
    "checkpoints/*/collection.json": "file-collection",
    "checkpoints/*/gym/*/manifest.json": "file-manifest",
}
LINES = {
    "checkpoints/*/gym/*/episodes-*.jsonl.zst": "line-index",
    "journal/dispatch-*.jsonl": "line-dispatch",
    "journal/events-*.jsonl": "line-events",
    "journal/outcomes-*.index.jsonl": "line-outcomes-index",
    "journal/outcomes-*.jsonl.zst": "line-outcomes",
}


def wrong_files(run: Path) -> list[tuple[str, str]]:
    """(file, what is wrong) of every file of a run that does not fit its schema. Each schema must have met a file."""
    wrong: list[tuple[str, str]] = []
    met: set[str] = set()
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(path.relative_to(run))
        for schema, values in _described(path, name):
            validator = jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{schema}.json").read_text()))
            for value in values:
                met.add(schema)
                wrong += [(name, error.message) for error in validator.iter_errors(value)]
    assert met == {*WHOLE.values(), *LINES.values()}
    return wrong


def _described(path: Path, name: str) -> Iterator[tuple[str, list[Any]]]:
    for pattern, schema in WHOLE.items():
        if fnmatch.fnmatch(name, pattern):
            yield schema, [jsoncodec.loads(path.read_bytes())]
    for pattern, schema in LINES.items():
        if fnmatch.fnmatch(name, pattern):
            yield schema, [jsoncodec.loads(line) for line in _content(path).splitlines()]


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix != ".zst":
        return data
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
