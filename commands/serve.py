"""`gymckpt serve`: the bundled servers in the foreground, until a signal."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer
from pydantic import SecretStr

from gymckpt import eventloop
from gymckpt.errors import ServerError, UsageError
from gymckpt.identity import is_safe_name
from gymckpt.servers.deployment import Deployment, bundled_deployment, print_deployment, read_deployment

from .console import note, show_json
from .tokens import required_control_token


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(
        "serve",
        epilog="Example: GYMCKPT_CONTROL_TOKEN=$(openssl rand -hex 16) gymckpt serve --taskset workbench --json",
    )(serve)


def serve(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Deployment file (YAML) instead of the default.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the deployment as a file to edit, start nothing.")
    ] = False,
    taskset: Annotated[
        list[str] | None, typer.Option("--taskset", metavar="NAME", help="Only the servers that this task set needs.")
    ] = None,
    port: Annotated[
        list[str] | None, typer.Option("--port", metavar="NAME=PORT", help="A fixed port; others are chosen.")
    ] = None,
    root: Annotated[
        Path | None, typer.Option("--root", metavar="DIR", help="Checkpoints are written below this directory only.")
    ] = None,
    lease: Annotated[
        float | None,
        typer.Option(
            "--lease",
            metavar="SECONDS",
            help="How long after the deadline of its last call a closed server waits for a controller [600].",
        ),
    ] = None,
    backend_url: Annotated[
        str | None, typer.Option("--backend-url", metavar="URL", help="OpenAI-compatible backend of the policy model.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The backend's name of the model.")
    ] = None,
    control_token_file: Annotated[
        Path | None,
        typer.Option("--control-token-file", metavar="FILE", help="Holds the control token; or GYMCKPT_CONTROL_TOKEN."),
    ] = None,
    log_dir: Annotated[Path, typer.Option("--log-dir", metavar="DIR", help="One log file a server.")] = Path("servers"),
    no_restart: Annotated[bool, typer.Option("--no-restart", help="Leave a server dead that died.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines: ready, then what happens.")] = False,
) -> None:
    """Runs the bundled servers until Ctrl-C or SIGTERM. A server that dies is started again, empty, on its port."""
    deployment = chosen_deployment(config, backend_url=backend_url, model=model)
    if taskset:
        deployment = _only(deployment, [name.removeprefix("@") for name in taskset])
    deployment = _with_ports(deployment, port or [])
    if lease is not None:
        if not 0 < lease <= 86_400:
            raise UsageError(f"--lease {lease} is not between 0 and 86400 seconds")
        deployment = deployment.with_checkpoint(lease_grace_seconds=lease)
    if root is not None:
        deployment = deployment.with_checkpoint(root=root.absolute())
    if print_config:
        print(print_deployment(deployment), end="")
        return
    token = required_control_token(control_token_file)
    eventloop.run(_serve(deployment, token, logs=log_dir, restart=not no_restart, as_json=as_json))


def chosen_deployment(config: Path | None, *, backend_url: str | None, model: str | None) -> Deployment:
    """The deployment that the flags describe."""
    deployment = bundled_deployment() if config is None else read_deployment(config)
    return deployment.with_backend(backend_url, model)


def _only(deployment: Deployment, tasksets: list[str]) -> Deployment:
    known = deployment.routes()
    if unknown := [name for name in tasksets if name not in known]:
        raise UsageError(f"--taskset {unknown[0]!r}: no environment runs it", hint=f"known: {', '.join(known)}")
    return deployment.for_tasksets(tasksets)


def _with_ports(deployment: Deployment, pairs: list[str]) -> Deployment:
    ports: dict[str, int] = {}
    for pair in pairs:
        name, _, number = pair.partition("=")
        if not is_safe_name(name) or not number.isdecimal() or not 0 < int(number) < 65_536:
            raise UsageError(f"--port {pair!r} is not NAME=PORT")
        ports[deployment.server(name).instance] = int(number)
    servers = tuple(s.model_copy(update={"port": ports.get(s.instance, s.port)}) for s in deployment.servers)
    return deployment.model_copy(update={"servers": servers})


async def _serve(deployment: Deployment, token: SecretStr, *, logs: Path, restart: bool, as_json: bool) -> None:
    from gymckpt.servers.supervisor import ServerEvent, Supervisor

    def tell(event: ServerEvent) -> None:
        if as_json:
            show_json({"event": event.event, "instance": event.instance, "detail": event.detail})
        else:
            note(event.detail)

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    supervisor = Supervisor(deployment, token=token, logs=logs, embedded=False, restart=restart, on_event=tell)
    async with supervisor:
        if as_json:
            servers = [{"kind": s.kind, "instance": s.instance, "url": s.url} for s in supervisor.servers]
            show_json({"event": "ready", "servers": servers})
        else:
            for server in supervisor.servers:
                print(f"{server.kind:12} {server.instance:16} {server.url}")
            addresses = " ".join(f"--url {s.instance}={s.url}" for s in supervisor.servers if s.kind != "worker")
            print(f"\nReady; logs in {logs}/. Ctrl-C ends them. From another shell, with the same token:", flush=True)
            print(f"  gymckpt collect TASKS {addresses}", flush=True)
        waiting = [asyncio.create_task(stopped.wait()), asyncio.create_task(supervisor.wait())]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if not stopped.is_set() and restart:
            raise ServerError("a server keeps dying", hint=f"see its log in {logs}/")
        if not stopped.is_set():
            await stopped.wait()
