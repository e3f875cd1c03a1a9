"""A NeMo Gym server as a participant, its class unchanged: around the app that `setup_webserver()` gives.

    from resources_servers.blackjack.app import BlackjackEnv
    from gymckpt.integrations.nemo_gym import participating

    if __name__ == "__main__":
        participating(BlackjackEnv).run_webserver()

Nothing of NeMo Gym is imported here, unless tools go over MCP: a server is told by the names of its base classes, and
used by the little that `GymServer` says.
"""

import inspect
import logging
import os
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, get_args

from fastapi import FastAPI
from pydantic import ValidationError

from gymckpt.errors import UsageError
from gymckpt.identity import Kind
from gymckpt.integrations.nemo_gym.adapters import Adapter
from gymckpt.integrations.nemo_gym.declarations import adapter_for
from gymckpt.integrations.nemo_gym.mcp_tokens import McpTokens, expose
from gymckpt.integrations.nemo_gym.model import ModelLayer, ModelParts
from gymckpt.integrations.nemo_gym.owners import OwnerLayer, OwnerRole
from gymckpt.integrations.nemo_gym.resources import CALLER_ID, SessionLayer
from gymckpt.participant.directories import require_root
from gymckpt.participant.marks import Marks
from gymckpt.participant.participant import Participant
from gymckpt.participant.role import Role
from gymckpt.participant.routes import mount
from gymckpt.ports import Clock, SystemClock, ThreadOffload
from gymckpt.roles.hook_errors import said
from gymckpt.roles.resources import ResourcesRole
from gymckpt.servers.resources.app import role_of
from gymckpt.servers.resources.declared import check_declared
from gymckpt.servers.resources.mcp_access import add_mcp_access
from gymckpt.settings import CheckpointSettings
from gymckpt.storage.files import LocalFileSystem
from gymckpt.wire.control import EXTENSION_MCP_ACCESS

log = logging.getLogger(__name__)

KINDS_BY_BASE: Mapping[str, Kind] = {
    "BaseEnvironmentServer": "environment",
    "SimpleResponsesAPIAgent": "agent",
    "SimpleResponsesAPIModel": "model",
    "SimpleResourcesServer": "resources",
}
TOKEN_VARIABLE, ROOT_VARIABLE = "GYMCKPT_CONTROL_TOKEN", "GYMCKPT_CHECKPOINT_ROOT"

S = TypeVar("S", bound=type)


class GymServer(Protocol):
    """What is used of a NeMo Gym server object."""

    config: Any
    server_client: Any

    def setup_webserver(self) -> FastAPI: ...

    def get_session_middleware_key(self) -> str: ...


def participating(server_class: S, adapter: type[Adapter] | None = None) -> S:
    """`server_class` with `setup_webserver()` giving a participant's app; its name, and so its cookies, stay the same.

    Settings come from the `checkpoint:` block of the server's configuration, or else from the environment
    (`GYMCKPT_CONTROL_TOKEN`, `GYMCKPT_CHECKPOINT_ROOT`); without either the server is what it was. `adapter` says what
    can be captured of a resources server's sessions; by default what is declared for this very class, and for any
    other class nothing. Raises `UsageError` for what is no server class of NeMo Gym, and as `check_adapter` does.
    """
    if not isinstance(server_class, type):
        raise UsageError(f"participating() takes a server class of NeMo Gym, not {server_class!r:.80}")
    check_adapter(server_class, adapter)
    chosen = adapter or adapter_for(server_class)

    def setup_webserver(self: Any) -> FastAPI:
        app: FastAPI = server_class.setup_webserver(self)  # type: ignore[attr-defined]
        attach(self, app, settings_of(self), adapter=chosen)
        return app

    members = {
        "setup_webserver": setup_webserver,
        "__module__": server_class.__module__,
        "__qualname__": server_class.__qualname__,
        "__doc__": server_class.__doc__,
    }
    made: Any = type(server_class)(server_class.__name__, (server_class,), members)
    return made  # type: ignore[no-any-return]


def settings_of(server: GymServer) -> CheckpointSettings:
    """The server's checkpoint settings; raises `UsageError` for a block that cannot be read."""
    block = _block(server)
    if block is None and (token := os.environ.get(TOKEN_VARIABLE)):
        block = {"enabled": True, "control_auth_token": token, "root": os.environ.get(ROOT_VARIABLE)}
    try:
        return CheckpointSettings.model_validate(block or {})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"checkpoint block of {server.config.name}: {where}: {first['msg']}") from error


def _block(server: GymServer) -> dict[str, Any] | None:
    known = server.server_client.global_config_dict.get(server.config.name) or {}
    for section in known.values():
        for implementation in section.values():
            block = implementation.get("checkpoint")
            if block is not None:
                return {str(name): block[name] for name in block}
    return None


def kind_of(server_class: type) -> Kind:
    """The kind of a NeMo Gym server class; raises `UsageError`."""
    for base in server_class.__mro__:
        if (kind := KINDS_BY_BASE.get(base.__name__)) is not None:
            return kind
    raise UsageError(f"{server_class.__module__}:{server_class.__name__} is no server class of NeMo Gym")


def check_adapter(server_class: type, adapter: Any) -> None:
    """Raise `UsageError` unless `adapter` is None, or a whole `Adapter` class for a resources server class."""
    kind = kind_of(server_class)
    if adapter is None:
        return
    if not isinstance(adapter, type) or not issubclass(adapter, Adapter):
        raise UsageError(
            f"the adapter of {server_class.__qualname__} is {adapter!r:.80}: it must be a class of Adapter"
        )
    if kind != "resources":
        raise UsageError(
            f"{server_class.__qualname__} is a server of kind {kind} and takes no adapter ({adapter.__qualname__}): "
            "adapters are for resources servers"
        )
    check_declared(adapter)


def attach(
    server: GymServer, app: FastAPI, settings: CheckpointSettings, *, adapter: type[Adapter] | None = None
) -> Participant | None:
    """Make `app`, which `server.setup_webserver()` gave, a participant; None, and nothing done, unless enabled.

    Call it before anything else is added to the app. Raises `UsageError` for several workers, for a server beyond
    loopback without `root`, and for an adapter that `check_adapter` refuses or that cannot be made.
    """
    if not settings.enabled:
        return None
    config, kind = server.config, kind_of(type(server))
    check_adapter(type(server), adapter)
    if (config.num_workers or 1) > 1:
        raise UsageError(f"{config.name}: num_workers > 1 cannot take part in checkpoints yet: run one worker")
    require_root(settings, config.host)
    clock, fs, offload = SystemClock(), LocalFileSystem(), ThreadOffload()
    told = _Refusals()
    role: Role
    match kind:
        case "resources":
            role = _resources(server, app, settings, adapter or adapter_for(type(server)), clock, told)
        case "model":
            parts = ModelParts(config.name, clock=clock, fs=fs, offload=offload)
            parts.live_with(app)
            app.add_middleware(ModelLayer, parts=parts, refused=told)
            role = parts.role
        case _:
            role = owner = OwnerRole(kind, config.name, Marks())
            app.add_middleware(OwnerLayer, role=owner, cookie=server.get_session_middleware_key(), refused=told)
    told.participant = mount(app, role, settings, clock=clock, fs=fs, offload=offload)
    return told.participant


def _resources(
    server: GymServer,
    app: FastAPI,
    settings: CheckpointSettings,
    adapter: type[Adapter],
    clock: Clock,
    refused: "_Refusals",
) -> ResourcesRole:
    cookie = server.get_session_middleware_key()
    tokens = McpTokens(server, cookie) if expose(server, app) else None
    chosen = _made(adapter, server)
    renews = tokens is not None and tokens.renewable
    role = role_of(chosen, clock, extensions=(EXTENSION_MCP_ACCESS,) if renews else ())
    app.add_middleware(
        SessionLayer,
        adapter=chosen,
        requests=role.requests,
        cookie=cookie,
        tokens=tokens,
        typed_seeds=takes_typed_seeds(server),
        keeps_prefix=_reads_prefix(app),
        refused=refused,
    )
    if tokens is not None and renews:
        add_mcp_access(app, role, settings, tokens.access)
    return role


def _made(adapter: type[Adapter], server: GymServer) -> Adapter:
    try:
        made = adapter(server.config.name, server)
    except Exception as error:  # an author's code may raise anything
        raise UsageError(f"{adapter.__qualname__}(instance, server) cannot be made: {said(error)}") from error
    if not hasattr(made, "overdue_hooks"):
        raise UsageError(f"{adapter.__qualname__}.__init__ must call super().__init__(instance, server)")
    return made


class _Refusals:
    """Tells the participant of refusals on the data plane, once there is one."""

    def __init__(self) -> None:
        self.participant: Participant | None = None

    def __call__(self, path: str, error: Any) -> None:
        if self.participant is not None:
            self.participant.refused(path, error)


def takes_typed_seeds(server: Any) -> bool:
    """Whether the server's seed reads `resources_session_id` and its companions, not a row's own fields."""
    seed = getattr(server, "seed_session", None)
    if seed is None:
        return False
    body = inspect.signature(seed, eval_str=True).parameters.get("body")
    forms = [] if body is None else [body.annotation, *get_args(body.annotation)]
    return any(CALLER_ID in getattr(form, "model_fields", {}) for form in forms)


def _reads_prefix(app: FastAPI) -> bool:
    names = (getattr(middleware.cls, "__name__", "") for middleware in app.user_middleware)
    return "RolloutContextMiddleware" in names
