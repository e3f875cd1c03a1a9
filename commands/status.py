"""`gymckpt status`: what each server is doing now."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gymckpt.errors import ServerError, UsageError
from gymckpt.ports import ServerRef

from .console import show, show_json
from .tokens import required_control_token


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(
        "status",
        epilog="Examples: gymckpt status runs/a · gymckpt status --url environment=http://127.0.0.1:8001",
    )(status)


def status(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A run directory: the servers that it was begun with.")
    ] = None,
    url: Annotated[
        list[str] | None, typer.Option("--url", metavar="NAME=URL", help="A server by its instance name.")
    ] = None,
    control_token_file: Annotated[
        Path | None,
        typer.Option("--control-token-file", metavar="FILE", help="Holds the control token; or GYMCKPT_CONTROL_TOKEN."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Shows each server's kind, phase, lease, work in flight, blockers, restarts and counters.

    Exit code 5 if a server cannot be asked.
    """
    servers = [server_of(pair) for pair in url or []]
    if directory is not None:
        servers += _servers_of(directory, {server.instance for server in servers})
    if not servers:
        raise UsageError("no server is named", hint="give --url NAME=URL, once for each server")
    token = required_control_token(control_token_file)

    from gymckpt.report.documents import StatusDocument
    from gymckpt.report.tables import servers_table

    from .asking import ask

    views = asyncio.run(ask(servers, token))
    if as_json:
        show_json(StatusDocument(servers=views).model_dump(mode="json"))
    else:
        show(servers_table(views))
    if any(view.problem is not None for view in views):
        raise typer.Exit(ServerError.exit_code)


def server_of(pair: str) -> ServerRef:
    """The server that `NAME=URL` names; raises `UsageError`."""
    name, equals, address = pair.partition("=")
    if not equals or not address.startswith(("http://", "https://")):
        raise UsageError(f"--url {pair!r} is not NAME=URL")
    return ServerRef(name, address.rstrip("/"))


def _servers_of(directory: Path, named: set[str]) -> list[ServerRef]:
    from gymckpt.collection.rundirectory import RunPaths, read_run
    from gymckpt.storage.files import LocalFileSystem

    settings = read_run(LocalFileSystem(), RunPaths(directory)).settings
    found = [ServerRef(name, url.rstrip("/")) for name, url in dict(settings.get("url", {})).items()]
    if not found:
        raise UsageError(
            f"{directory} was begun with servers of its own, on ports that only its collector knows",
            hint="its progress is in: gymckpt inspect; its servers' logs are in servers/",
        )
    return [server for server in found if server.instance not in named]
