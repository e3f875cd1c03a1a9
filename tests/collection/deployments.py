"""A collector in one process, over an in-memory network and real files: what tests of the collector stand on."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymckpt import jsoncodec
from gymckpt.collection import collector
from gymckpt.collection.collector import Summary
from gymckpt.collection.inputs import TaskInput
from gymckpt.collection.opening import Ports
from gymckpt.collection.routing import Server
from gymckpt.collection.settings import CollectSettings
from gymckpt.collection.signals import Wishes
from gymckpt.ports import ServerRef, SystemClock, ThreadOffload
from gymckpt.storage.files import LocalFileSystem
from tests.simulation.transport import MemoryNetwork

ENVIRONMENT = ServerRef("environment", "http://environment")

Answer = Callable[[dict[str, Any]], Awaitable[tuple[int, Any, dict[str, str]]]]
"""A `/run` body to (status, JSON body, headers)."""


async def judged(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
    """Every rollout succeeds, with a reward of 1 for even tasks."""
    if "task" not in body:
        return 200, {"reward": 1.0, "response": {"id": "flat"}}, {}
    task = body["task"]
    number = int(task["task_id"]["task_id"])
    seed = task["task_input"]["responses_create_params"].get("metadata", {}).get("seed")
    return 200, {"reward": float(number % 2 == 0), "response": {"seed": seed}}, {}


@dataclass
class PlainEnvironment:
    """An ASGI app with `GET /` and `POST /run`, and without the control plane."""

    answer: Answer = judged
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        status, headers = 404, dict[str, str]()
        body: Any = {"detail": "not found"}
        if scope["path"] == "/":
            status, body = 200, {"status": "ok"}
        elif scope["path"] == "/run":
            request = jsoncodec.loads(message["body"])
            self.bodies.append(request)
            status, body, headers = await self.answer(request)
        names = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": names})
        await send({"type": "http.response.body", "body": body if isinstance(body, bytes) else jsoncodec.dumps(body)})


def typed_row(number: int, **params: Any) -> dict[str, Any]:
    """A typed row of task set `numbers`."""
    seed = {"metadata": {"seed": f"numbers/{number}"}}
    return {
        "task_id": {"taskset": "numbers", "task_id": str(number)},
        "task_input": {
            "responses_create_params": {"input": f"{number}?", **seed, **params},
            "task_data": {"n": number},
        },
    }


def rows(items: Iterable[Any], name: str = "tasks.jsonl") -> TaskInput:
    """An input of these rows (or raw lines)."""
    lines = [item if isinstance(item, bytes) else jsoncodec.dumps(item) for item in items]
    return TaskInput(name, lambda: [b"".join(line + b"\n" for line in lines)])


@dataclass
class Collected:
    """A collector's doings in one directory."""

    directory: Path
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    servers: tuple[Server, ...] = (Server(ENVIRONMENT),)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ports(self) -> Ports:
        return Ports(SystemClock(), LocalFileSystem(), ThreadOffload(), self.network, self.network)

    def collect(self, items: Iterable[Any] | TaskInput, *, wishes: Wishes | None = None, **settings: Any) -> Summary:
        """Run `collect` to its end."""
        source = items if isinstance(items, TaskInput) else rows(items)
        return asyncio.run(self.collecting(source, wishes, **settings))

    async def collecting(self, source: TaskInput, wishes: Wishes | None = None, **settings: Any) -> Summary:
        return await collector.collect(
            CollectSettings(tasks=source.name, **settings),
            self.directory,
            self.servers,
            self.ports,
            on_event=self.events.append,
            wishes=wishes,
            source=source,
        )

    def restore(self, *, wishes: Wishes | None = None, **settings: Any) -> Summary:
        """Run `restore` to its end."""
        return asyncio.run(
            collector.restore(
                CollectSettings(**settings),
                self.directory,
                self.servers,
                self.ports,
                on_event=self.events.append,
                wishes=wishes,
            )
        )

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The rows of a result file."""
        return [jsoncodec.loads(line) for line in (self.directory / name).read_bytes().split(b"\n") if line]


def plain(directory: Path, answer: Answer = judged) -> tuple[Collected, PlainEnvironment]:
    """A collector with one environment that is no participant."""
    collected, environment = Collected(directory), PlainEnvironment(answer)
    collected.network.serve(ENVIRONMENT, environment)
    return collected, environment
