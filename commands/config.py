"""`gymckpt config`: every setting, its value, and where it came from."""

from typing import Annotated, Any

import typer
from rich.table import Table

from gymckpt.collection.settings import scope_of

from . import flags
from .console import show, show_json


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(
        "config",
        epilog="Examples: gymckpt config --origin · GYMCKPT_CONCURRENCY=8 gymckpt config --json",
    )(flags.with_settings(show_config))


def show_config(
    given: dict[str, Any],
    origin: Annotated[bool, typer.Option("--origin", help="Also show where each value came from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Shows the settings that `gymckpt collect` would use, given here or not. Takes the same flags; sends nothing.

    The first source that has a value wins: command line, GYMCKPT_ variables (nested with __), .env, gymckpt.toml, the
    table tool.gymckpt of pyproject.toml, default. Secrets are never shown.
    """
    loaded = flags.load(given)
    values = loaded.settings.model_dump(mode="json")
    if as_json:
        shown = {
            name: {"value": value, "origin": loaded.origins[name], "scope": scope_of(name)}
            for name, value in values.items()
        }
        show_json({"settings": shown})
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("setting")
    table.add_column("value")
    if origin:
        table.add_column("from")
    for name, value in values.items():
        table.add_row(*([name, _plain(value), loaded.origins[name]] if origin else [name, _plain(value)]))
    show(table)


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return " ".join(f"{name}={item}" for name, item in value.items() if item is not None) or "-"
    return " ".join(map(str, value)) or "-" if isinstance(value, list) else str(value)
