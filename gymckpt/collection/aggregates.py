"""What the servers themselves make of all results: `/aggregate_metrics`, on those that have it.

A benchmark may know headline numbers that no mean tells. They stand in `aggregate_metrics.json`, in the shape of Gym's
own file, beside the metrics from the journal, which are there whatever a server says.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gymckpt import jsoncodec
from gymckpt.collection.events import Outcome
from gymckpt.collection.opening import Opened, Ports
from gymckpt.collection.routing import Server
from gymckpt.errors import GymckptError
from gymckpt.ports import Deadline
from gymckpt.storage.durable import replace_file
from gymckpt.storage.outcomes import Outcome as StoredOutcome
from gymckpt.wire.client import json_object
from gymckpt.wire.gym import AGGREGATE_METRICS_PATH

TIMEOUT_S: Final = 600.0
PROBE_TIMEOUT_S: Final = 10.0
MAX_REQUEST_BYTES: Final = 64 << 20
"""All results of a server go in one request, without the conversations; more than this is not asked for."""
BATCH: Final = 256
METHOD_NOT_ALLOWED: Final = 405

LEFT_OUT: Final = frozenset(
    {"response", "responses_create_params", "ng_agent_observations", "ng_model_call_capture", "ng_trajectory"}
)
OF_THE_RESPONSE: Final = ("usage", "incomplete_details")
"""What is left of a conversation in the request, as Gym's own collector leaves it."""


async def aggregate(opened: Opened, servers: Sequence[Server], ports: Ports) -> list[str]:
    """Ask every server that rollouts went to and that has the route, and write what they say; gives notes for a person.

    Never fails a run: a server that cannot be asked is noted.
    """
    asked = {server.ref.instance: server for server in servers if server.ref.instance in opened.record.owners}
    having = [server for server in asked.values() if await _has_route(server, ports)]
    if not having:
        return []
    entries: list[dict[str, Any]] = []
    notes: list[str] = []
    for server in having:
        try:
            entries.append(await _ask(opened, server, ports))
        except GymckptError as error:
            notes.append(f"no aggregate metrics of {server.ref.instance}: {error.detail}")
    if entries:
        content = jsoncodec.dumps(entries) + b"\n"
        await ports.offload.run(lambda: replace_file(ports.fs, opened.paths.aggregate_metrics, content))
    return notes


async def _has_route(server: Server, ports: Ports) -> bool:
    """A GET changes nothing, and is refused by method where the route is there for POST."""
    limit = Deadline.after(ports.clock, PROBE_TIMEOUT_S)
    try:
        reply = await ports.data.call(server.ref, "GET", AGGREGATE_METRICS_PATH, deadline=limit)
    except GymckptError:
        return False
    return reply.status == METHOD_NOT_ALLOWED


async def _ask(opened: Opened, server: Server, ports: Ports) -> dict[str, Any]:
    stored = await ports.offload.run(lambda: _results_of(opened, server.ref.instance))
    lines: list[bytes] = []
    size = 0
    for begin in range(0, len(stored), BATCH):
        for row in await opened.journals.rows(stored[begin : begin + BATCH]):
            lines.append(jsoncodec.dumps(stripped(row or {})))
            size += len(lines[-1])
        if size > MAX_REQUEST_BYTES:
            raise GymckptError(f"{len(stored)} results are more than fit one request")
    body = b'{"verify_responses":[' + b",".join(lines) + b"]}"
    limit = Deadline.after(ports.clock, TIMEOUT_S)
    reply = await ports.data.call(server.ref, "POST", AGGREGATE_METRICS_PATH, body, deadline=limit)
    said = json_object(reply, f"{AGGREGATE_METRICS_PATH} of {server.ref.instance}")
    return {
        "agent_ref": {"name": server.agent or server.ref.instance},
        "_ng_environment_server": server.ref.instance,
        **said,
    }


def stripped(row: Mapping[str, Any]) -> dict[str, Any]:
    """A result without its conversation."""
    kept = {name: value for name, value in row.items() if name not in LEFT_OUT}
    response = row.get("response")
    if isinstance(response, dict):
        told = {name: response[name] for name in OF_THE_RESPONSE if response.get(name) is not None}
        if told:
            kept["response"] = told
    return kept


def _results_of(opened: Opened, instance: str) -> list[StoredOutcome]:
    """The results of the rollouts that went to one server, by (task, repeat). Blocking."""
    run, plan = opened.run, opened.plan
    places = {
        (planned.task, planned.repeat)
        for frame in plan.frames
        for planned in plan.read_frame(frame, lambda task, repeat: True)
        if planned.owner == instance
    }
    found: dict[tuple[int, int], StoredOutcome] = {}
    for outcome, stored in opened.journals.outcomes():
        if _counts(outcome, run.opening(outcome.episode.rollout_id)):
            place = run.place(outcome.episode.rollout_id)
            if place in places:
                found.setdefault(place, stored)
    return [found[place] for place in sorted(found)]


def _counts(outcome: Outcome, opening: int) -> bool:
    return outcome.final and outcome.outcome == "succeeded" and outcome.opening == opening
