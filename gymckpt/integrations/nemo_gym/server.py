"""NeMo Gym servers in a deployment file of ours: `implementation: gymckpt.integrations.nemo_gym.server:build`.

Each runs in a process of its own under the same supervisor as the bundled servers. With `checkpoint.enabled: false` it
is Gym's server as it is, without a control plane.
"""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from pydantic import Field

from gymckpt.errors import UsageError
from gymckpt.integrations.nemo_gym.adapters import Adapter
from gymckpt.integrations.nemo_gym.attaching import attach
from gymckpt.integrations.nemo_gym.mcp_tokens import expose
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.resources.options import read_options
from gymckpt.settings import CheckpointSettings, Settings


class GymServerOptions(Settings):
    """What a deployment says about a NeMo Gym server."""

    server: str
    """Its folder, as in `resources_servers/string_match`."""
    server_class: str | None = None
    """`module:class` of a class of one's own, instead of the one in that folder."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Its own settings, as in Gym's configuration; `${urls.NAME}` is the address of the server called NAME."""
    gym: dict[str, Any] = Field(default_factory=dict)
    """Top-level settings of Gym, such as `observability_enabled`."""
    adapter: str | None = None
    """`module:class` of an adapter of one's own, for a resources server."""


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """See `servers.registry.Builder`. Must be called on a running event loop, where Gym's HTTP client lives."""
    wanted = read_options(GymServerOptions, instance, options)
    server_class = load_class(wanted.server) if wanted.server_class is None else _loaded(wanted.server_class)
    utilities = importlib.import_module("nemo_gym.server_utils")
    configuration = _configuration(instance, wanted, neighbours)
    # Code that asks for the global configuration gets this one, instead of reading our command line.
    vars(importlib.import_module("nemo_gym.global_config"))["_GLOBAL_CONFIG_DICT"] = configuration
    head = importlib.import_module("nemo_gym.config_types").BaseServerConfig(host="127.0.0.1", port=11000)
    client = utilities.ServerClient(head_server_config=head, global_config_dict=configuration)
    section, implementation = _folder(wanted.server)
    own = importlib.import_module("omegaconf").OmegaConf.to_container(
        configuration[instance][section][implementation], resolve=True
    )
    config = server_class.model_fields["config"].annotation.model_validate({**own, "name": instance})
    server = server_class(config=config, server_client=client)
    app: FastAPI = server.setup_webserver()
    attach(server, app, checkpoint, adapter=_adapter(wanted.adapter))
    expose(server, app)
    server.setup_liveness(app)
    server.setup_exception_middleware(app)
    server.setup_cancellation_middleware(app)
    if not utilities.is_global_aiohttp_client_setup():
        utilities.set_global_aiohttp_client(utilities.GlobalAIOHTTPAsyncClientConfig())
    return app


def load_class(folder: str) -> Any:
    """The server class in a folder of the installed NeMo Gym; raises `UsageError`."""
    section, implementation = _folder(folder)
    try:
        module = importlib.import_module(f"{section}.{implementation}.app")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(section):
            own = _beside(section, implementation)
            if own is not None and str(own) not in sys.path:
                # Some servers import the files beside them by their bare names, as when run from their own folder.
                sys.path.insert(0, str(own))
                return load_class(folder)
        raise UsageError(
            f"{folder} cannot be loaded: {error}", hint="is NeMo Gym installed, with this server's own needs?"
        ) from error
    base = importlib.import_module("nemo_gym.server_utils").SimpleServer
    found = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, base) and member.__module__ == module.__name__
    ]
    leaves = [one for one in found if not any(other is not one and issubclass(other, one) for other in found)]
    if len(leaves) != 1:
        raise UsageError(f"{folder}: {len(leaves)} server classes are in its app.py, not one")
    return leaves[0]


def _beside(section: str, implementation: str) -> Path | None:
    for root in importlib.import_module(section).__path__:
        folder = Path(root) / implementation
        if folder.is_dir():
            return folder
    return None


def _folder(server: str) -> tuple[str, str]:
    section, slash, implementation = server.partition("/")
    if not slash or "/" in implementation:
        raise UsageError(f"server {server[:160]!r} is not SECTION/NAME, as in resources_servers/string_match")
    return section, implementation


def _configuration(instance: str, wanted: GymServerOptions, neighbours: Neighbours) -> Any:
    """Gym's global configuration, as far as one server needs it: itself, and where the others are."""
    everyone = {
        name: {"servers": {name.replace(".", "_"): _address(ref.url)}} for name, ref in neighbours.servers.items()
    }
    section, implementation = _folder(wanted.server)
    own = {**wanted.config, "entrypoint": "app.py", **_address(neighbours.ref(instance).url)}
    everything = {
        **everyone,
        **wanted.gym,
        instance: {section: {implementation: own}},
        "urls": {name: ref.url for name, ref in neighbours.servers.items()},
    }
    return importlib.import_module("omegaconf").OmegaConf.create(everything)


def _address(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {"host": parts.hostname, "port": parts.port}


def _adapter(name: str | None) -> type[Adapter] | None:
    if name is None:
        return None
    found = _loaded(name)
    if not (isinstance(found, type) and issubclass(found, Adapter)):
        raise UsageError(f"adapter {name[:160]!r} is no Adapter")
    return found


def _loaded(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{name[:160]!r} cannot be loaded: {error}") from error
