"""A deployment: which servers run together, and what each is told about the others.

A deployment file is YAML or JSON with one key, `servers`; `gymckpt serve --print-config` shows the bundled one. It
holds no secret: the control token is handed to every server when it starts.
"""

import importlib.util
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

import yaml
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator

from gymckpt.errors import UsageError
from gymckpt.identity import KINDS, Kind, is_safe_name
from gymckpt.ports import ServerRef
from gymckpt.settings import CheckpointSettings, Settings

ServerKind: TypeAlias = Kind | Literal["worker"]
"""A worker is an inference server behind the policy model: it takes no part in checkpoints."""

Implementation = Literal[
    "single_agent_turn",
    "simple_agent",
    "policy_model",
    "scripted",
    "llama",
    "workbench",
    "answer_match",
    "judged",
    "math",
    "pairwise",
    "shell",
]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

EXTRAS = {"math": "math_verify"}
"""Bundled task sets whose server needs the extra of the same name, with the package that tells whether it is there."""

MAX_DEPLOYMENT_BYTES = 1 << 20
LOOPBACK = "127.0.0.1"


class CheckpointBlock(Settings):
    """The `checkpoint:` block of one server in a deployment file: `CheckpointSettings` without the token."""

    enabled: bool = True
    lease_grace_seconds: float = Field(default=600.0, gt=0, le=86_400)
    root: Path | None = None
    max_record_bytes: int = Field(default=1 << 30, ge=1 << 10)
    compression_level: int = Field(default=1, ge=1, le=19)
    workers: int = Field(default=1, ge=1)

    def settings(self, token: SecretStr | None) -> CheckpointSettings:
        """The settings of the running server; raises `UsageError` when enabled without a token."""
        try:
            return CheckpointSettings(**self.model_dump(), control_auth_token=token if self.enabled else None)
        except ValidationError as error:
            raise UsageError(f"checkpoint: {error.errors()[0]['msg']}") from error


class ServerConfig(Settings):
    """One server of a deployment."""

    instance: str
    kind: ServerKind
    implementation: str
    """A bundled implementation, or `package.module:build` of one's own."""
    host: str = LOOPBACK
    """The address to listen on."""
    advertised_host: str | None = None
    """The name under which others reach it; by default `host`, or this machine's name where that is a wildcard."""
    port: int = Field(default=0, ge=0, le=65_535)
    """0: a free one, chosen at every start."""
    start_timeout_s: float = Field(default=60.0, gt=0.0, le=3600.0)
    """It must listen by then; a server that imports much, such as NeMo Gym's, may need more on a busy machine."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What this implementation alone understands."""
    checkpoint: CheckpointBlock = CheckpointBlock()

    @field_validator("instance")
    @classmethod
    def _safe(cls, instance: str) -> str:
        if not is_safe_name(instance):
            raise ValueError(f"instance {instance[:160]!r} is not 1 to 128 of [A-Za-z0-9._-]")
        return instance

    @field_validator("implementation")
    @classmethod
    def _known(cls, implementation: str) -> str:
        if implementation not in IMPLEMENTATIONS and ":" not in implementation:
            raise ValueError(f"unknown implementation {implementation[:80]!r}: one of {', '.join(IMPLEMENTATIONS)}")
        return implementation

    def url(self, port: int) -> str:
        """The server's base URL, once its port is known."""
        wildcard = self.host in ("0.0.0.0", "::", "")  # noqa: S104 - compared, not bound
        host = self.advertised_host or (socket.gethostname() if wildcard else self.host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def participates(self) -> bool:
        """Whether this server serves the checkpoint control plane."""
        return self.kind in KINDS and self.checkpoint.enabled

    def checkpoint_settings(self, token: SecretStr | None) -> CheckpointSettings:
        """The settings of the running server; raises `UsageError` when a participant is to run without a token.

        A worker takes no part, but serves generation cuts to whoever has the token.
        """
        if self.participates or (self.kind == "worker" and token is not None):
            return self.checkpoint.settings(token)
        return CheckpointSettings()


class Deployment(Settings):
    """Servers that run together; instance names are unique."""

    servers: tuple[ServerConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = [server.instance for server in self.servers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two servers are called {', '.join(twice)}")
        return self

    def server(self, instance: str) -> ServerConfig:
        """The server called `instance`; raises `UsageError`."""
        for server in self.servers:
            if server.instance == instance:
                return server
        raise UsageError(
            f"the deployment has no server {instance[:160]!r}",
            hint=f"it has {', '.join(server.instance for server in self.servers)}",
        )

    def for_tasksets(self, tasksets: Iterable[str]) -> "Deployment":
        """Without the resources servers that no environment needs for `tasksets`; those of unknown use stay."""
        wanted = set(tasksets)
        needed = {resources for _, taskset, resources in self._tasksets() if taskset in wanted}
        unused = {resources for _, _, resources in self._tasksets()} - needed
        kept = []
        for server in self.servers:
            if server.instance in unused:
                continue
            if server.kind == "environment":
                known = {taskset: r for taskset, r in _tasksets_of(server).items() if r not in unused}
                server = server.model_copy(update={"options": {**server.options, "tasksets": known}})
            kept.append(server)
        return self.model_copy(update={"servers": tuple(kept)})

    def with_options(self, implementation: str, **options: Any) -> "Deployment":
        """With `options` set on every server of `implementation`."""
        return self.model_copy(
            update={
                "servers": tuple(
                    s.model_copy(update={"options": {**s.options, **options}})
                    if s.implementation == implementation
                    else s
                    for s in self.servers
                )
            }
        )

    def with_backend(self, url: str | None, model: str | None) -> "Deployment":
        """With the policy model server's backend at `url`, asked for `model`; None leaves what there is."""
        changed = self
        if url is not None:
            if not url.startswith(("http://", "https://")):
                raise UsageError(f"--backend-url {url!r} is not an http(s) URL")
            changed = changed.with_options("policy_model", backend=None, backend_urls=[url], control_urls=[])
        if model is not None:
            changed = changed.with_options("policy_model", model=model)
        return changed

    def with_checkpoint(self, **fields: Any) -> "Deployment":
        """With `fields` set in the checkpoint block of every server."""
        return self.model_copy(
            update={
                "servers": tuple(
                    s.model_copy(update={"checkpoint": s.checkpoint.model_copy(update=fields)}) for s in self.servers
                )
            }
        )

    def routes(self) -> dict[str, str]:
        """Task set -> environment instance, as the collector routes typed rows."""
        return {taskset: environment for environment, taskset, _ in self._tasksets()}

    def tasksets(self, instance: str) -> frozenset[str] | None:
        """The task sets that an environment server runs; None where it takes any, or where nobody knows."""
        server = self.server(instance)
        if server.implementation not in IMPLEMENTATIONS or server.options.get("resources_server") is not None:
            return None
        return frozenset(_tasksets_of(server))

    def _tasksets(self) -> list[tuple[str, str, str]]:
        return [
            (server.instance, taskset, resources)
            for server in self.servers
            if server.kind == "environment"
            for taskset, resources in _tasksets_of(server).items()
        ]


def _tasksets_of(environment: ServerConfig) -> dict[str, str]:
    tasksets = environment.options.get("tasksets", {})
    return {str(taskset): str(resources) for taskset, resources in dict(tasksets).items()}


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The other servers of a deployment, by instance name."""

    servers: Mapping[str, ServerRef]

    def ref(self, instance: str) -> ServerRef:
        """Where `instance` is; raises `UsageError` if the deployment has no such server."""
        try:
            return self.servers[instance]
        except KeyError:
            raise UsageError(
                f"no server is called {instance[:160]!r}", hint=f"known: {', '.join(sorted(self.servers))}"
            ) from None


def bundled_deployment() -> Deployment:
    """The servers that come with the package: one of each implementation, on fresh loopback ports.

    `math` is among them where its extra is installed.
    """
    every = Deployment(
        servers=(
            ServerConfig(
                instance="environment",
                kind="environment",
                implementation="single_agent_turn",
                options={
                    "agent": "agent",
                    "tasksets": {
                        "workbench": "workbench",
                        "answers": "answer_match",
                        "judged": "judged",
                        "math": "math",
                        "pairwise": "pairwise",
                        "shell": "shell",
                    },
                },
            ),
            ServerConfig(
                instance="agent", kind="agent", implementation="simple_agent", options={"model": "policy_model"}
            ),
            ServerConfig(
                instance="policy_model", kind="model", implementation="policy_model", options={"backend": "worker"}
            ),
            ServerConfig(instance="worker", kind="worker", implementation="scripted"),
            ServerConfig(instance="workbench", kind="resources", implementation="workbench"),
            ServerConfig(instance="answer_match", kind="resources", implementation="answer_match"),
            ServerConfig(instance="judged", kind="resources", implementation="judged", options={"judge": "worker"}),
            ServerConfig(instance="math", kind="resources", implementation="math"),
            ServerConfig(instance="pairwise", kind="resources", implementation="pairwise", options={"judge": "worker"}),
            ServerConfig(instance="shell", kind="resources", implementation="shell"),
        )
    )
    absent = {taskset for taskset, package in EXTRAS.items() if importlib.util.find_spec(package) is None}
    return every.for_tasksets(set(every.routes()) - absent) if absent else every


def read_deployment(path: Path) -> Deployment:
    """The deployment in a YAML or JSON file; raises `UsageError` naming the file and the field."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_DEPLOYMENT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_DEPLOYMENT_BYTES:
        raise UsageError(f"{path} is larger than {MAX_DEPLOYMENT_BYTES} bytes: not a deployment file")
    try:
        return Deployment.model_validate(yaml.safe_load(data))
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is no YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(
            f"{path}: {where}: {first['msg']}", hint="compare with `gymckpt serve --print-config`"
        ) from error


def print_deployment(deployment: Deployment) -> str:
    """The deployment as YAML, fit for `read_deployment`."""
    plain = deployment.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
