"""The path prefix that names a request's rollout, as pure ASGI: `/ng-rollout/<capture key>/v1/responses`."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import quote

from gymckpt import jsoncodec
from gymckpt.errors import ControlError, InvalidRolloutId
from gymckpt.identity import EpisodeId
from gymckpt.wire.control import ROLLOUT_PREFIX

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

EPISODE = "episode"
"""Name in the request's state under which the `EpisodeId` of a prefixed request is found (absent otherwise)."""


class RolloutPrefix:
    """Takes the prefix off the path and puts the episode into the request's state (`request.state.episode`)."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        root = scope.get("root_path", "")
        if scope["type"] != "http" or not path.startswith(f"{root}{ROLLOUT_PREFIX}/"):
            await self._app(scope, receive, send)
            return
        key, slash, rest = path[len(root) + len(ROLLOUT_PREFIX) + 1 :].partition("/")
        try:
            episode = EpisodeId.parse(key)
        except InvalidRolloutId as error:
            await send_json(send, error.http_status, error_body(error))
            return
        plain = f"{root}{slash}{rest}" or "/"
        state = {**(scope.get("state") or {}), EPISODE: episode}
        await self._app({**scope, "path": plain, "raw_path": quote(plain).encode(), "state": state}, receive, send)


def error_body(error: ControlError) -> dict[str, Any]:
    """`{"error": {"code", "detail"}}`, with the hint at the end of the detail."""
    detail = f"{error.detail} ({error.hint})" if error.hint else error.detail
    return {"error": {"code": error.code, "detail": detail}}


async def send_json(send: Send, status: int, body: Any) -> None:
    """Answer a request with JSON."""
    data = jsoncodec.dumps(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
