"""`schemas/` says what the models say."""

import json
import subprocess
import sys
from pathlib import Path

from commands.schemas import SCHEMAS
from tests.cli.terminal import inline

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
