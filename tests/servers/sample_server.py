"""A server of one's own, as a deployment file names it: `sample_server:build`."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from gymckpt.errors import UsageError
from gymckpt.servers.deployment import Neighbours
from gymckpt.settings import CheckpointSettings


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """Answers who it is, whom it knows and whether it was given a token."""
    if "refuse" in options:
        raise UsageError(f"option refuse: {options['refuse']}", hint="leave it out")
    if "crash" in options or Path(options.get("crash_while", "/nowhere")).exists():
        os._exit(7)
    if "hang" in options:
        signal.pause()
    helper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) if "helper" in options else None
    app = FastAPI()

    @app.get("/")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/self")
    async def myself() -> dict[str, Any]:
        token = checkpoint.control_auth_token
        return {
            "pid": os.getpid(),
            "instance": instance,
            "neighbours": {name: ref.url for name, ref in neighbours.servers.items()},
            "token": token.get_secret_value() if token else None,
            "environment": sorted(os.environ),
            "arguments": sys.argv,
            "helper": helper.pid if helper else None,
        }

    return app
