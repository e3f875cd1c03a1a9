"""NeMo Gym's counters behind a door that refuses as a closed participant may: `tests.interop.refusing:build`."""

from typing import Any

from fastapi import FastAPI

from gymckpt.errors import AdmissionClosed
from gymckpt.integrations.nemo_gym import server
from gymckpt.participant.prefix import App, Receive, Scope, Send, error_body, send_json
from gymckpt.servers.deployment import Neighbours
from gymckpt.settings import CheckpointSettings


class Door:
    """The first `refusals` seeds are refused."""

    def __init__(self, app: App, refusals: int) -> None:
        self._app = app
        self._left = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/seed_session") and self._left:
            self._left -= 1
            refusal = AdmissionClosed("closed for a checkpoint of somebody else")
            await send_json(send, refusal.http_status, error_body(refusal))
        else:
            await self._app(scope, receive, send)


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """Option `refusals`, and those of a NeMo Gym server."""
    refusals = options.pop("refusals")
    app = server.build(instance, options, checkpoint, neighbours)
    app.add_middleware(Door, refusals=refusals)
    return app
