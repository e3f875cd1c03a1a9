"""NeMo Gym's own head server over a list and a configuration in files, which a test keeps true."""

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from gymckpt.servers.deployment import Neighbours
from gymckpt.settings import CheckpointSettings


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """See `servers.registry.Builder`. Options: `listed` and `configuration`, the files."""
    listed, configured = Path(options["listed"]), Path(options["configuration"])
    base: Any = importlib.import_module("nemo_gym.server_utils").HeadServer
    config: Any = importlib.import_module("nemo_gym.config_types").BaseServerConfig

    def instances(self: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(listed.read_text())
        return found

    async def configuration(self: Any) -> str:
        return await asyncio.to_thread(configured.read_text)

    members = {
        "get_server_instances": instances,
        "global_config_dict_yaml": configuration,
        "__module__": __name__,
        "__qualname__": "Head",
    }
    head = type(base)("Head", (base,), members)(config=config(host="127.0.0.1", port=1))
    app: FastAPI = head.setup_webserver()
    return app
