"""Which code builds which server. Modules are imported only in the process that serves them."""

import importlib
from typing import Any, Protocol, cast

from fastapi import FastAPI

from gymckpt.errors import UsageError
from gymckpt.servers.deployment import Implementation, Neighbours, ServerConfig
from gymckpt.settings import CheckpointSettings


class Builder(Protocol):
    """Builds one server's app. With `checkpoint` disabled: no route, middleware, bookkeeping or header of ours."""

    def __call__(
        self, instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours
    ) -> FastAPI: ...


BUILDERS: dict[Implementation, str] = {
    "single_agent_turn": "gymckpt.servers.environment:build",
    "simple_agent": "gymckpt.servers.agent:build",
    "policy_model": "gymckpt.servers.model:build",
    "scripted": "gymckpt.servers.worker:build",
    "llama": "gymckpt.servers.worker_llama:build",
    "workbench": "gymckpt.servers.resources.workbench:build",
    "answer_match": "gymckpt.servers.resources.answers:build",
    "judged": "gymckpt.servers.resources.judged:build",
    "math": "gymckpt.servers.resources.mathematics:build",
    "pairwise": "gymckpt.servers.resources.pairwise:build",
    "shell": "gymckpt.servers.resources.shell:build",
}
"""`module:function` by implementation."""


def builder(implementation: str) -> Builder:
    """The builder of a bundled implementation, or of `module:function`; raises `UsageError`."""
    target = next((target for name, target in BUILDERS.items() if name == implementation), implementation)
    module_name, _, function = target.partition(":")
    try:
        return cast(Builder, getattr(importlib.import_module(module_name), function))
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"implementation {implementation[:160]!r} cannot be loaded: {error}") from error


def build_app(config: ServerConfig, checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """The app of one server of a deployment."""
    return builder(config.implementation)(config.instance, dict(config.options), checkpoint, neighbours)
