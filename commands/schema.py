"""`gymckpt schema`: JSON Schema of every message, file and printed document."""

from typing import Annotated

import typer

from gymckpt.errors import UsageError

from .console import show_json


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("schema", epilog="Examples: gymckpt schema · gymckpt schema inspect > inspect.schema.json")(schema)


def schema(
    name: Annotated[
        str | None, typer.Argument(help="Which one; without it the names are listed.", metavar="NAME")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (a schema always is).")] = False,
) -> None:
    """Prints the JSON Schema of a control message, a file of the run directory, or a document printed by --json."""
    from .schemas import SCHEMAS, json_schema

    if name is None:
        if as_json:
            show_json({"schemas": sorted(SCHEMAS)})
        else:
            print("\n".join(sorted(SCHEMAS)))
        return
    if name not in SCHEMAS:
        raise UsageError(f"there is no schema {name[:80]!r}", hint="gymckpt schema lists the names")
    print(json_schema(name), end="")
