"""Flags of `collect` and `restore`, derived from the settings model, so that flag, variable and file never disagree."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, BeforeValidator, SecretStr
from pydantic.fields import FieldInfo

from gymckpt import jsoncodec
from gymckpt.collection import origins
from gymckpt.collection.options import format_duration, parse_duration_s
from gymckpt.collection.origins import Loaded
from gymckpt.collection.settings import CollectSettings, Sampling

from .console import note

SPELLING: Mapping[str, str] = {"params": "--param"}
"""Flags whose name is not that of the setting."""

PANELS: Mapping[str, tuple[str, ...]] = {
    "What to collect": (
        "limit", "shuffle", "seed", "repeats", "agent", "routes", "model", "cohort", *Sampling.model_fields,
    ),
    "Servers": (
        "url", "gym_head", "serve", "serve_config", "backend_url", "control_token_file", "path_map", "restart_servers",
    ),
    "Checkpoints": (
        "checkpoint_every", "checkpoint_timeout", "commit_timeout", "restore_timeout", "keep",
        "max_checkpoint_failures", "grace",
    ),
    "Resuming": ("resume", "overwrite", "start_over", "salvage", "steal_lock", "accept_change"),
}  # fmt: skip
OTHER_PANEL = "How to collect"


def load(given: Mapping[str, Any], run: Mapping[str, Any] | None = None) -> Loaded:
    """Every setting, with these flags; what may be a misspelled variable is told. Raises `UsageError`."""
    loaded = origins.load(given, directory=Path.cwd(), run=run)
    for doubt in loaded.doubts:
        note(doubt)
    return loaded


def flag(name: str) -> str:
    """The flag of the setting `name`."""
    return SPELLING.get(name, "--" + name.replace("_", "-"))


def with_settings(verb: Callable[..., None], *, leave_out: frozenset[str] = frozenset()) -> Callable[..., None]:
    """`verb` with a flag for every setting but `leave_out`.

    It is called with its own parameters and with `given`: what the command line set, by name of the setting.
    """
    fields = {name: field for name, field in CollectSettings.model_fields.items() if name not in leave_out}
    nested = {
        (name, inner): inner_field
        for name, field in fields.items()
        if (model := _model(field)) is not None
        for inner, inner_field in model.model_fields.items()
    }
    plain = {name: field for name, field in fields.items() if _model(field) is None and _secret(field) is False}
    parameters = [_parameter(name, field) for name, field in plain.items()]
    parameters += [_parameter(inner, field) for (_, inner), field in nested.items()]

    @wraps(verb)
    def run(**values: Any) -> None:
        given: dict[str, Any] = {}
        for name in plain:
            if (value := values.pop(name)) not in (None, []):
                given[name] = value
        for name, inner in nested:
            if (value := values.pop(inner)) not in (None, []):
                given.setdefault(name, {})[inner] = _parsed_pairs(value) if inner == "params" else value
        verb(given=given, **values)

    own = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in inspect.signature(verb, eval_str=True).parameters.values()
        if p.name != "given"
    ]
    arguments = [p for p in own if p.default is inspect.Parameter.empty]
    options = [p for p in own if p.default is not inspect.Parameter.empty]
    signature = inspect.Signature([*arguments, *parameters, *options])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return run


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    kind: Any
    if name == "tasks":
        kind = Annotated[str | None, typer.Argument(help=field.description, metavar="TASKS", show_default=False)]
    else:
        spelled = flag(name)
        value = _plain_type(field)
        if value is bool:
            spelled = f"{spelled}/--no-{spelled.removeprefix('--')}" if field.default is True else spelled
        kind = Annotated[
            bool | None if value is bool else list[str] | None if value is list else str | None,
            typer.Option(
                spelled,
                help=_help(field),
                metavar=None if value is bool else _metavar(field),
                rich_help_panel=next((panel for panel, names in PANELS.items() if name in names), OTHER_PANEL),
                show_default=False,
            ),
        ]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _help(field: FieldInfo) -> str:
    text = (field.description or "").removesuffix(".")
    text = text.removeprefix(_metavar(field) + ": ")
    shown = _shown_default(field)
    return text[:1].upper() + text[1:] + (f" (default {shown})" if shown else "")


def _shown_default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None or default is False or default == () or default == {}:
        return ""
    if default is True:
        return "on"
    if default == {"*": 1}:
        return "1"
    return format_duration(default) if _is_duration(field) else str(default)


def _metavar(field: FieldInfo) -> str:
    head, _, rest = (field.description or "").partition(":")
    if rest and "=" in head and " " not in head:
        return head  # NAME=URL: what the description begins with
    if _is_duration(field):
        return "DURATION"
    return {int: "N", float: "NUMBER", Path: "PATH"}.get(_base(field.annotation), "TEXT")


def _is_duration(field: FieldInfo) -> bool:
    return any(isinstance(item, BeforeValidator) and item.func is parse_duration_s for item in field.metadata)


def _plain_type(field: FieldInfo) -> type:
    base = _base(field.annotation)
    if base is bool:
        return bool
    if base in (dict, tuple) and field.get_default(call_default_factory=True, validated_data={}) != {"*": 1}:
        return list
    return str


def _base(annotation: Any) -> Any:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return _base(next(a for a in typing.get_args(annotation) if a is not type(None)))
    if origin is Annotated:
        return _base(typing.get_args(annotation)[0])
    return origin or annotation


def _model(field: FieldInfo) -> type[BaseModel] | None:
    base = _base(field.annotation)
    return base if isinstance(base, type) and issubclass(base, BaseModel) else None


def _secret(field: FieldInfo) -> bool:
    return _base(field.annotation) is SecretStr


def _parsed_pairs(pairs: list[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--param {pair!r} is not NAME=VALUE")
        try:
            parsed[name] = jsoncodec.loads(text)
        except ValueError:
            parsed[name] = text
    return parsed
