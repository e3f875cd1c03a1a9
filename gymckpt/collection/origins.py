"""Reads the settings from all their sources, and remembers where each value came from."""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import (
    DotEnvSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    PyprojectTomlConfigSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from pydantic_settings.exceptions import SettingsError

from gymckpt.collection.settings import ENV_PREFIX, CollectSettings
from gymckpt.errors import UsageError

COMMAND_LINE = "command line"
DEFAULT = "default"
RUN = "run.json"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and each field's origin: `command line`, `environment GYMCKPT_X`, a file, `default`, `run.json`."""

    settings: CollectSettings
    origins: Mapping[str, str]
    doubts: tuple[str, ...] = ()
    """What may have been meant as a setting and is none."""


class _Pyproject(CollectSettings):
    model_config = SettingsConfigDict(pyproject_toml_table_header=("tool", "gymckpt"))


def load(
    command_line: Mapping[str, Any] | None = None,
    *,
    directory: Path | None = None,
    run: Mapping[str, Any] | None = None,
) -> Loaded:
    """Resolve all settings. `command_line` holds only what was given; files are looked for in `directory` (the current
    one); `run` is what run.json stored, which stands above files and environment in a restore but below the flags.

    Raises `UsageError` naming each wrong field and its origin.
    """
    where = directory or Path.cwd()
    layers: list[tuple[str, dict[str, Any]]] = [(DEFAULT, {})]
    layers += _file_layers(where)
    layers.append((".env", _read(DotEnvSettingsSource(CollectSettings, env_file=where / ".env"), ".env")))
    layers.append(("environment", _read(EnvSettingsSource(CollectSettings), "environment")))
    if run is not None:
        layers.append((RUN, dict(run)))
    layers.append((COMMAND_LINE, dict(command_line or {})))
    merged: dict[str, Any] = {}
    origins = dict.fromkeys(CollectSettings.model_fields, DEFAULT)
    for origin, values in layers:
        for name, value in values.items():
            both = isinstance(merged.get(name), dict) and isinstance(value, dict) and name == "sampling"
            merged[name] = {**merged[name], **value} if both else value
            origins[name] = f"environment {ENV_PREFIX}{name.upper()}" if origin == "environment" else origin
    try:
        return Loaded(CollectSettings(**merged), origins, tuple(_misspelled(os.environ)))
    except ValidationError as error:
        raise UsageError("; ".join(_problem(item, origins) for item in error.errors(include_input=False))) from None


def _file_layers(where: Path) -> list[tuple[str, dict[str, Any]]]:
    layers = []
    if (project := where / "pyproject.toml").is_file():
        layers.append(("pyproject.toml", _read(PyprojectTomlConfigSettingsSource(_Pyproject, project), str(project))))
    if (toml := where / "gymckpt.toml").is_file():
        layers.append(("gymckpt.toml", _read(TomlConfigSettingsSource(CollectSettings, toml), str(toml))))
    return layers


def _read(source: PydanticBaseSettingsSource, origin: str) -> dict[str, Any]:
    try:
        values = source()
    except (SettingsError, ValueError) as error:
        raise UsageError(f"{origin}: {error}") from error
    if origin != ".env":
        return values
    # A .env file serves other programs too: what is no setting of ours is none of our business.
    return {name: value for name, value in values.items() if name in CollectSettings.model_fields}


def _misspelled(environment: Iterable[str]) -> Iterator[str]:
    """Variables whose names are almost those of settings: other names with our prefix may be somebody else's."""
    known = {f"{ENV_PREFIX}{name.upper()}" for name in CollectSettings.model_fields}
    for name in sorted(environment):
        if name.startswith(ENV_PREFIX) and (stem := name.partition("__")[0]) not in known:
            for meant in difflib.get_close_matches(stem, known, n=1, cutoff=0.85):
                yield f"{name} in the environment is no setting, and is ignored: did you mean {meant}?"


def _problem(item: Any, origins: Mapping[str, str]) -> str:
    name = ".".join(str(part) for part in item["loc"]) or "settings"
    origin = origins.get(str(item["loc"][0]), COMMAND_LINE) if item["loc"] else ""
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{name}: {message}" + (f" (from {origin})" if origin else "")
