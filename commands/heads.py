"""The servers behind a Gym head server: names, addresses and kinds as it lists them, bindings as it configures them.

A head server also gives away API keys; nothing of its configuration is kept but names, kinds and bindings.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

from gymckpt import jsoncodec
from gymckpt.collection.processes import Mark, Processes
from gymckpt.collection.routing import Server
from gymckpt.errors import ServerError
from gymckpt.identity import Kind
from gymckpt.ports import Deadline, Reply, ServerRef, SystemClock, Transport
from gymckpt.wire.client import HttpTransport
from gymckpt.wire.gym import ServerInstance

HEAD_TIMEOUT_S: Final = 30.0
KINDS_BY_SECTION: Final[dict[str, Kind]] = {
    "environment_servers": "environment",
    "responses_api_agents": "agent",
    "responses_api_models": "model",
    "resources_servers": "resources",
}


async def servers_of(url: str) -> tuple[tuple[Server, ...], Processes]:
    """Every server that the head at `url` lists, and the processes behind them; raises `ServerError`."""
    async with HttpTransport(max_connections=2) as transport:
        listed = await _get(transport, url, "/server_instances")
        configured = await _get(transport, url, "/global_config_dict_yaml")
    servers = read_servers(listed, configured, url)

    async def read() -> Mapping[str, Mark]:
        async with HttpTransport(max_connections=1) as transport:
            return marks(await _get(transport, url, "/server_instances"), url)

    return servers, Processes(marks(listed, url), read)


def marks(listed: Any, url: str) -> dict[str, Mark]:
    """The process behind each name; raises `ServerError` for another shape."""
    return {_name(instance): (instance.pid, instance.start_time) for instance in _instances(listed, url)}


async def _get(transport: Transport, url: str, path: str) -> Any:
    head = ServerRef("head server", url.rstrip("/"))
    deadline = Deadline.after(SystemClock(), HEAD_TIMEOUT_S)
    reply: Reply = await transport.call(head, "GET", path, deadline=deadline)
    if reply.status != 200:
        raise ServerError(f"{head.url}{path} answered HTTP {reply.status}", hint="is this a Gym head server?")
    try:
        return jsoncodec.loads(reply.body)
    except ValueError as error:
        raise ServerError(f"{head.url}{path} answered no JSON", hint="is this a Gym head server?") from error


def read_servers(listed: Any, configured: Any, url: str) -> tuple[Server, ...]:
    """The servers in the two answers of a head; raises `ServerError` for another shape."""
    instances = _instances(listed, url)
    try:
        configuration = yaml.safe_load(configured) or {}
        bound = dict(_bindings(configuration))
        asked = dict(_asked(configuration))
    except (TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise ServerError(f"{url} does not describe its servers as a Gym head does: {error}") from error
    return tuple(_server(instance, bound, asked) for instance in instances)


def _instances(listed: Any, url: str) -> list[ServerInstance]:
    try:
        return [ServerInstance.model_validate(instance) for instance in listed]
    except (TypeError, ValueError) as error:
        raise ServerError(f"{url} does not describe its servers as a Gym head does: {error}") from error


def _name(instance: ServerInstance) -> str:
    # `name` is that of the implementation; rows and configuration use the name that the process was given.
    return instance.process_name or instance.name


def _server(instance: ServerInstance, bound: dict[str, str], asked: dict[str, frozenset[str]]) -> Server:
    name = _name(instance)
    kind = KINDS_BY_SECTION.get(instance.server_type or "")
    return Server(ServerRef(name, instance.url.rstrip("/")), kind, bound.get(name), asked.get(name))


def _bindings(configuration: dict[str, Any]) -> list[tuple[str, str]]:
    """(environment, the agent that it is bound to)."""
    return [
        (str(name), agent)
        for name, block in configuration.items()
        if isinstance(block, dict)
        for implementation in dict(block.get("environment_servers") or {}).values()
        if (agent := _agent(implementation)) is not None
    ]


def _asked(configuration: dict[str, Any]) -> list[tuple[str, frozenset[str]]]:
    """(resources server, the models that it refers to)."""
    return [
        (str(name), frozenset(_models(list(dict(block["resources_servers"]).values()))))
        for name, block in configuration.items()
        if isinstance(block, dict) and block.get("resources_servers")
    ]


def _models(value: Any) -> Iterator[str]:
    """Names in every reference to a model server below `value`, as Gym writes them: {type, name}."""
    if isinstance(value, dict):
        if value.get("type") == "responses_api_models" and "name" in value:
            yield str(value["name"])
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _models(inner)


def _agent(implementation: Any) -> str | None:
    reference = implementation.get("agent_server") if isinstance(implementation, dict) else None
    name = reference.get("name") if isinstance(reference, dict) else None
    return str(name) if name is not None else None
