"""What the collector itself costs: CPU seconds of its process a rollout, against a server that does nothing.

    .venv/bin/python scripts/bench/collect.py [--rollouts N] [--rounds N] [--concurrency N ...]

Beside it run, interleaved, a bare loop on the same transport that posts the same bodies and appends the same results
durably, the same loop on plain aiohttp, and, in an environment that has NeMo Gym, its own rollout collection (which
syncs nothing). Each runs in a process of its own; the server has one too. Nothing of a start is counted.
"""

import argparse
import asyncio
import importlib
import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gymckpt import eventloop

REPLY = {"reward": 1.0, "responses_create_params": {"input": "?"}, "response": {"output": ["x" * 1500]}}


def row(number: int) -> dict[str, Any]:
    params = {"input": f"{number} " + "y" * 1500, "metadata": {"seed": str(number)}}
    return {
        "task_id": {"taskset": "bench", "task_id": str(number)},
        "task_input": {"responses_create_params": params, "task_data": {"n": number}},
    }


def serve() -> None:
    """The server that does nothing: parses nothing, answers the same bytes."""
    import uvicorn

    body = json.dumps(REPLY).encode()
    start = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }
    missing = {"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"2")]}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        run = scope["path"] == "/run"
        await send(start if run else missing)
        await send({"type": "http.response.body", "body": body if run else b"{}"})

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(app, log_level="error", timeout_keep_alive=75, lifespan="off", access_log=False)
    asyncio.run(uvicorn.Server(config).serve([listening]))


async def collector(url: str, rollouts: int, concurrency: int, directory: Path) -> None:
    from gymckpt import jsoncodec
    from gymckpt.collection import collector
    from gymckpt.collection.inputs import TaskInput
    from gymckpt.collection.opening import Ports
    from gymckpt.collection.routing import Server
    from gymckpt.collection.settings import CollectSettings
    from gymckpt.ports import ServerRef, SystemClock, ThreadOffload
    from gymckpt.storage.files import LocalFileSystem
    from gymckpt.wire.client import HttpTransport

    settings = CollectSettings(tasks="bench", concurrency=concurrency)
    source = TaskInput("bench", lambda: (jsoncodec.dumps(row(n)) + b"\n" for n in range(rollouts)))
    servers = (Server(ServerRef("environment", url)),)
    async with HttpTransport(max_connections=concurrency) as data, HttpTransport(max_connections=16) as control:
        ports = Ports(SystemClock(), LocalFileSystem(), ThreadOffload(), data, control)
        summary = await collector.collect(settings, directory, servers, ports, source=source)
    assert summary.counts.succeeded == rollouts


class _Durable:
    """Appends lines to a file; those who wait share an fsync."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir()
        self._file = path.open("ab", buffering=0)
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def append(self, line: bytes) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((line, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())
        await future

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            data = b"".join(line for line, _ in batch)
            await asyncio.get_running_loop().run_in_executor(None, self._store, data)
            for _, future in batch:
                future.set_result(None)

    def _store(self, data: bytes) -> None:
        self._file.write(data)
        os.fsync(self._file.fileno())


async def bare(url: str, rollouts: int, concurrency: int, directory: Path) -> None:
    """The same bodies on the same transport, the same results appended durably, and nothing else."""
    from gymckpt import jsoncodec
    from gymckpt.ports import Deadline, ServerRef, SystemClock
    from gymckpt.wire.client import HttpTransport

    server, clock = ServerRef("environment", url), SystemClock()
    results = _Durable(directory / "rollouts.jsonl")
    numbers = iter(range(rollouts))
    async with HttpTransport(max_connections=concurrency) as transport:

        async def worker() -> None:
            for number in numbers:
                reply = await transport.call(
                    server, "POST", "/run", _body(number), deadline=Deadline.after(clock, 600.0)
                )
                await results.append(jsoncodec.dumps({**jsoncodec.loads(reply.body), "_ng_task_index": number}) + b"\n")

        await asyncio.gather(*(worker() for _ in range(concurrency)))


async def plain_aiohttp(url: str, rollouts: int, concurrency: int, directory: Path) -> None:
    import aiohttp
    import orjson

    results = _Durable(directory / "rollouts.jsonl")
    numbers = iter(range(rollouts))
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def worker() -> None:
            for number in numbers:
                headers = {"content-type": "application/json"}
                async with session.post(url + "/run", data=orjson.dumps(_body(number)), headers=headers) as reply:
                    body = orjson.loads(await reply.read())
                await results.append(orjson.dumps({**body, "_ng_task_index": number}) + b"\n")

        await asyncio.gather(*(worker() for _ in range(concurrency)))


async def gym(url: str, rollouts: int, concurrency: int, directory: Path) -> None:
    """NeMo Gym's own collection of as many rows of the same size, told of the server as its launcher would."""
    theirs = importlib.import_module("nemo_gym.rollout_collection")
    tasks = _flat_rows(directory, rollouts)
    config = theirs.RolloutCollectionConfig(
        input_jsonl_fpath=str(tasks),
        output_jsonl_fpath=str(directory / "rollouts.jsonl"),
        num_samples_in_parallel=concurrency,
        disable_aggregation=True,
    )
    await theirs.RolloutCollectionHelper().run_from_config(config)


def _flat_rows(directory: Path, rollouts: int) -> Path:
    directory.mkdir()
    tasks = directory / "tasks.jsonl"
    with tasks.open("w") as file:
        for number in range(rollouts):
            params = row(number)["task_input"]["responses_create_params"]
            flat = {"responses_create_params": params, "agent_ref": {"type": "responses_api_agents", "name": "agent"}}
            file.write(json.dumps(flat) + "\n")
    return tasks


def _gym_config(url: str) -> str:
    host, _, port = url.removeprefix("http://").partition(":")
    address = {"host": host, "port": int(port)}
    there = {**address, "entrypoint": "app.py"}
    agent = {"type": "responses_api_agents", "name": "agent"}
    servers = {
        "head_server": address,
        "agent": {"responses_api_agents": {"simple_agent": there}},
        "environment": {"environment_servers": {"single_agent_turn": {**there, "agent": agent}}},
    }
    return json.dumps(servers)


def _body(number: int) -> dict[str, Any]:
    made = row(number)
    return {"episode_id": {"rollout_id": f"0-{number}", "attempt": 0}, "task": made}


KINDS = {"collector": collector, "bare": bare, "aiohttp": plain_aiohttp}
if importlib.util.find_spec("nemo_gym") is not None:
    KINDS["gym"] = gym


async def _measured(kind: str, url: str, rollouts: int, concurrency: int, scratch: Path) -> dict[str, float]:
    await KINDS[kind](url, 1, 1, scratch / "first")  # imports and the like
    usage, wall = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    await KINDS[kind](url, rollouts, concurrency, scratch / "run")
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    return {"cpu_s": cpu_s, "wall_s": time.monotonic() - wall}


def measure(kind: str, url: str, rollouts: int, concurrency: int) -> None:
    """Run one kind in this process, and print its CPU and wall seconds."""
    os.environ["NEMO_GYM_CONFIG_DICT"] = _gym_config(url)
    with tempfile.TemporaryDirectory() as scratch:
        run = asyncio.run if kind == "gym" else eventloop.run  # theirs runs in asyncio's own loop
        measured = run(_measured(kind, url, rollouts, concurrency, Path(scratch)))
    print()
    print(json.dumps(measured))


def _run(*arguments: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256, 1024])
    options = parser.parse_args()
    server = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
    try:
        print(f"{options.rollouts} rollouts, CPU ms a rollout of the collecting process (median of {options.rounds})")
        print("concurrency" + "".join(f"{kind:>11}" for kind in KINDS) + "  collector/bare  collector/aiohttp", end="")
        print("  rollouts/s" + ("  rate of collector/gym" if "gym" in KINDS else ""))
        for concurrency in options.concurrency:
            found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
            for _ in range(options.rounds):
                for kind, results in found.items():
                    results.append(_run(kind, url, str(options.rollouts), str(concurrency)))
            cpu = {kind: _median(r["cpu_s"] for r in results) for kind, results in found.items()}
            wall = {kind: _median(r["wall_s"] for r in results) for kind, results in found.items()}
            print(
                f"{concurrency:11d}" + "".join(f"{cpu[kind] / options.rollouts * 1e3:11.3f}" for kind in KINDS), end=""
            )
            print(f"{cpu['collector'] / cpu['bare']:16.2f}{cpu['collector'] / cpu['aiohttp']:19.2f}", end="")
            rate = f"{options.rollouts / wall['collector']:12.0f}"
            print(rate + (f"{wall['gym'] / wall['collector']:23.2f}" if "gym" in KINDS else ""), flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    elif len(sys.argv) == 5 and sys.argv[1] in KINDS:
        measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
