"""Apps on real sockets in the running event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from gymckpt.ports import ServerRef

Build = Callable[[Mapping[str, ServerRef]], FastAPI]
"""Makes one server's app; it is told where all of them are."""


@asynccontextmanager
async def served(builds: Mapping[str, Build]) -> AsyncIterator[dict[str, ServerRef]]:
    """Serve every app on a loopback port of its own for the length of the `async with`."""
    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in builds}
    refs = {name: ServerRef(name, f"http://127.0.0.1:{s.getsockname()[1]}") for name, s in sockets.items()}
    servers = []
    for name, build in builds.items():
        config = uvicorn.Config(build(refs), log_level="error", timeout_keep_alive=75, timeout_graceful_shutdown=1)
        servers.append((uvicorn.Server(config), sockets[name]))
    tasks = [asyncio.create_task(server.serve(sockets=[s])) for server, s in servers]
    # The sockets listen already: whoever connects before a server has started waits in line.
    try:
        yield refs
    finally:
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)
