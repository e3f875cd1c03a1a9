"""`/aggregate_metrics` of whoever owns episodes: what its resources server makes of all results, as under Gym's own."""

from typing import Final

from fastapi import FastAPI, Request, Response

from gymckpt.ports import Deadline
from gymckpt.roles.neighbours import Neighbourhood
from gymckpt.roles.tasksets import TasksetOptions
from gymckpt.servers.bodies import read_bytes
from gymckpt.wire.gym import AGGREGATE_METRICS_PATH

TIMEOUT_S: Final = 600.0


def add_aggregates(app: FastAPI, options: TasksetOptions, neighbours: Neighbourhood) -> None:
    """Pass the route on to the resources server, where there is only one: results do not say whose they are.

    A server without the route answers for itself, to a GET too: by that a collector tells.
    """
    if len(options.resources) != 1:
        return
    [instance] = options.resources

    async def passed_on(request: Request) -> Response:
        body = await read_bytes(request)
        deadline = Deadline.after(neighbours.clock, TIMEOUT_S)
        server = neighbours.server(instance)
        reply = await neighbours.transport.call(
            server, request.method, AGGREGATE_METRICS_PATH, body or None, deadline=deadline
        )
        return Response(reply.body, status_code=reply.status, media_type="application/json")

    app.add_api_route(AGGREGATE_METRICS_PATH, passed_on, methods=["GET", "POST"], response_model=None)
