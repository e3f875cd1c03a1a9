"""The edges of a collector for changes to a run by hand."""

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


@asynccontextmanager
async def with_connections(number: int) -> AsyncIterator[Ports]:
    """Ports of a change that asks a server something, over so many connections at most."""
    async with HttpTransport(max_connections=number) as data, HttpTransport(max_connections=1) as control:
        yield Ports(SystemClock(), LocalFileSystem(), ThreadOffload(), data=data, control=control)
