"""The workbench server: `build` makes its app."""

from typing import Any

from fastapi import FastAPI

from gymckpt.ports import SystemClock, ThreadOffload
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.resources.app import resources_app
from gymckpt.servers.resources.options import read_options
from gymckpt.servers.resources.workbench.server import Workbench, WorkbenchOptions
from gymckpt.settings import CheckpointSettings


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """See `servers.registry.Builder`; options are `WorkbenchOptions`."""
    clock, offload = SystemClock(), ThreadOffload()
    settings = read_options(WorkbenchOptions, instance, options)
    server = Workbench(instance, settings, clock=clock, offload=offload)
    exposed = settings.expose_tools_over_mcp
    return resources_app(server, checkpoint, clock=clock, offload=offload, expose_tools_over_mcp=exposed)
