"""`schemas/` says what the models say."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands.schemas import SCHEMAS
from gymckpt import jsoncodec
from gymckpt.collection import events
from tests.cli.schemafiles import wrong_files
from tests.cli.terminal import inline
from tests.collection.test_events import EXAMPLES

jsonschema: Any = importlib.import_module("jsonschema")

CHECKOUT = Path(__file__).resolve().parents[2]


def test_the_published_schemas_are_those_of_the_models() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/schemas", "--check"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_schema_can_be_printed_and_is_json() -> None:
    listed = inline("schema").stdout.split()
    assert listed == sorted(SCHEMAS)
    schema = json.loads(inline("schema", "inspect").stdout)
    assert schema == json.loads((CHECKOUT / "schemas" / "inspect.json").read_text())
    assert "checkpoints" in schema["properties"]


def test_every_file_of_a_run_fits_its_schema(run: Path) -> None:
    assert wrong_files(run) == []


def test_a_file_that_does_not_fit_is_found(run: Path) -> None:
    record = run / "run.json"
    record.write_bytes(record.read_bytes().replace(b'"run_id"', b'"run_key"'))
    assert {name for name, _ in wrong_files(run)} == {"run.json"}


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.event)
def test_every_event_fits_the_schema_of_its_journal(event: events.Event) -> None:
    line: dict[str, Any] = {"seq": 1, "synced": 0, "event": events.to_json(event), "crc32c": "00000000"}
    if isinstance(event, events.Outcome):
        line["payload"] = event.row
    schema = json.loads((CHECKOUT / "schemas" / f"line-{event.journal}.json").read_text())
    line = jsoncodec.loads(jsoncodec.dumps(line))
    jsonschema.validate(line, schema)
    line["event"]["unheard_of"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(line, schema)
