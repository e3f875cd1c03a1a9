"""Embedded servers: the bundled deployment as children of one command, with fresh ports and a fresh token."""

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from pydantic import SecretStr

from gymckpt.collection.routing import Server
from gymckpt.collection.settings import CollectSettings
from gymckpt.errors import UsageError
from gymckpt.servers.deployment import EXTRAS, IMPLEMENTATIONS, Deployment, bundled_deployment, read_deployment
from gymckpt.servers.supervisor import ServerEvent, Supervisor

from .tokens import fresh_token

BUNDLED: Final = "@"
"""Task sets whose name begins with this come with the package, and need its servers."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """Servers that run for as long as the command does."""

    servers: tuple[Server, ...]
    token: SecretStr


def wanted(settings: CollectSettings) -> bool:
    """Whether the command is to start the bundled servers."""
    if settings.serve or settings.serve_config is not None:
        return True
    elsewhere = bool(settings.url) or settings.gym_head is not None
    return not elsewhere and (settings.tasks or "").startswith(BUNDLED)


def chosen(settings: CollectSettings) -> Deployment:
    """The deployment to start: only what the task set needs; raises `UsageError` (wrong file, missing extra)."""
    deployment = bundled_deployment() if settings.serve_config is None else read_deployment(settings.serve_config)
    deployment = deployment.with_backend(settings.backend_url, settings.model)
    taskset = (settings.tasks or "").removeprefix(BUNDLED)
    if (settings.tasks or "").startswith(BUNDLED) and taskset in deployment.routes():
        return deployment.for_tasksets([taskset])
    if (settings.tasks or "").startswith(BUNDLED) and settings.serve_config is None and taskset in EXTRAS:
        raise UsageError(f"the server of {settings.tasks} needs a package", hint=f"pip install 'gymckpt[{taskset}]'")
    return deployment


def absolute(directory: Path) -> Path:
    """The directory as servers may be told: absolute, without `..`, symlinks left as they are."""
    return Path(os.path.abspath(directory))  # noqa: PTH100 - Path.resolve would follow symlinks


@asynccontextmanager
async def running(
    settings: CollectSettings, directory: Path, on_event: Callable[[Mapping[str, Any]], None]
) -> AsyncIterator[Embedded]:
    """Start the servers for a run in `directory`; they log below it and write checkpoints nowhere else."""

    def tell(event: ServerEvent) -> None:
        on_event({"event": f"server_{event.event}", "instance": event.instance, "detail": event.detail})

    token = fresh_token()
    deployment = chosen(settings).with_checkpoint(root=absolute(directory))
    with ExitStack() as stack:
        logs = _logs(settings, directory, stack)
        supervisor = Supervisor(deployment, token=token, logs=logs, restart=settings.restart_servers, on_event=tell)
        on_event({"event": "note", "text": f"starting {', '.join(s.instance for s in deployment.servers)}"})
        async with supervisor:
            yield Embedded(_servers(deployment, supervisor), token)


def _logs(settings: CollectSettings, directory: Path, stack: ExitStack) -> Path:
    if settings.dry_run:  # which leaves nothing behind
        return Path(stack.enter_context(TemporaryDirectory(prefix="gymckpt-dry-run-")))
    directory.mkdir(mode=0o750 if settings.group_readable else 0o700, parents=True, exist_ok=True)
    return directory / "servers"


def _models(deployment: Deployment, instance: str) -> frozenset[str] | None:
    """The models that a bundled verifier asks; of somebody's own nobody knows."""
    config = deployment.server(instance)
    if config.kind != "resources" or config.implementation not in IMPLEMENTATIONS:
        return None
    return frozenset({str(config.options["judge"])} if "judge" in config.options else ())


def _servers(deployment: Deployment, supervisor: Supervisor) -> tuple[Server, ...]:
    found = []
    for server in supervisor.servers:
        if server.kind != "worker":
            agent = deployment.server(server.instance).options.get("agent") if server.kind == "environment" else None
            bound = str(agent) if agent is not None else None
            tasksets = deployment.tasksets(server.instance) if server.kind == "environment" else None
            found.append(Server(server.ref, server.kind, bound, _models(deployment, server.instance), tasksets))
    return tuple(found)
