"""All servers of a deployment file in one process: `python -m tests.interop.host FILE`. Killed, all are gone at once.

Importing NeMo Gym takes seconds of each process; twenty verifiers in twenty processes would take most of the time of
these tests. Every server has its own port, which the file must name. Prints `{"event": "ready"}` when all listen.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import yaml
from pydantic import SecretStr

from gymckpt.ports import ServerRef
from gymckpt.servers.child import reserve
from gymckpt.servers.deployment import Deployment, Neighbours
from gymckpt.servers.registry import build_app


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(deployment: Deployment, token: SecretStr) -> None:
    """Serve all of them until this process is killed."""
    refs = {one.instance: ServerRef(one.instance, one.url(one.port)) for one in deployment.servers}
    servers, sockets = [], []
    for one in deployment.servers:
        app = build_app(one, one.checkpoint_settings(token), Neighbours(refs))
        settings = uvicorn.Config(app, log_config=None, access_log=False, timeout_keep_alive=75, lifespan="on")
        servers.append(_Server(settings))
        sockets.append(reserve(one.host, one.port))
    serving = [asyncio.create_task(server.serve([one])) for server, one in zip(servers, sockets, strict=True)]
    while not all(server.started for server in servers):  # noqa: ASYNC110 - uvicorn offers nothing to wait on
        await asyncio.sleep(0.02)
    print(json.dumps({"event": "ready"}), flush=True)
    await asyncio.gather(*serving)


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    deployment = Deployment.model_validate(yaml.safe_load(Path(sys.argv[1]).read_text()))
    asyncio.run(serve(deployment, SecretStr(os.environ["GYMCKPT_CONTROL_TOKEN"])))


if __name__ == "__main__":
    main()
