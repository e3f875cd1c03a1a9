"""The edges of a collector that talks to no server: for changes to a run by hand."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gymckpt.collection.opening import Ports
from gymckpt.ports import SystemClock, ThreadOffload
from gymckpt.storage.files import LocalFileSystem
from gymckpt.wire.client import HttpTransport


@asynccontextmanager
async def without_servers() -> AsyncIterator[Ports]:
    """Ports whose transports are never used."""
    async with HttpTransport(max_connections=1) as transport:
        yield Ports(SystemClock(), LocalFileSystem(), ThreadOffload(), data=transport, control=transport)
