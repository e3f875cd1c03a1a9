"""Requests from other processes to a running collector: files in `requests/`, answered in the events journal."""

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from gymckpt import jsoncodec
from gymckpt.collection.rundirectory import RunPaths
from gymckpt.errors import GymckptError, UsageError
from gymckpt.identity import is_safe_name
from gymckpt.ports import FileSystem
from gymckpt.storage.durable import exists, make_directories, read_small, remove_quietly, write_new

_NAME = re.compile(r"request-[0-9a-f]{16}\.json\Z")
_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Request:
    """Take a checkpoint now; `name` keeps it for ever, None asks for an unnamed one."""

    request: str
    name: str | None


def ask_for_checkpoint(fs: FileSystem, paths: RunPaths, name: str | None) -> str:
    """Leave a request for the collector of this run; gives its id, by which the journal answers. Blocking."""
    if name is not None and not is_safe_name(name):
        raise UsageError(f"{name[:160]!r} is no safe name", hint="letters, digits, '.', '_', '-', at most 128")
    request = f"request-{secrets.token_hex(8)}"
    make_directories(fs, paths.requests)
    write_new(fs, paths.requests / f"{request}.json", jsoncodec.dumps({"checkpoint": True, "name": name}))
    return request


def open_requests(fs: FileSystem, paths: RunPaths) -> Iterator[Request]:
    """The requests that wait, oldest name first; what cannot be read is removed. Blocking."""
    if exists(fs, paths.requests) is None:
        return
    for entry in fs.scan(paths.requests):
        if not _NAME.match(entry.name):
            continue
        try:
            value = jsoncodec.loads(read_small(fs, paths.requests / entry.name, _LIMIT_BYTES))
            name = value["name"]
            if name is not None and not (isinstance(name, str) and is_safe_name(name)):
                raise ValueError(name)
        except (GymckptError, KeyError, TypeError, ValueError):
            remove_quietly(fs, paths.requests / entry.name)
            continue
        yield Request(entry.name.removesuffix(".json"), name)


def close_request(fs: FileSystem, paths: RunPaths, request: str) -> None:
    """The request was answered. Blocking."""
    remove_quietly(fs, paths.requests / f"{request}.json")
