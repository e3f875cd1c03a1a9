"""Tool calls over MCP: one POST a call, to a server that answers each by itself (as Gym's and ours do).

The session is named by a token in a header. It came with the seed and is in no record: after a restore the server is
asked for a new one, under the new attempt.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gymckpt import jsoncodec
from gymckpt.identity import EpisodeId
from gymckpt.ports import Reply, ServerRef
from gymckpt.roles.neighbours import NeighbourFailed, Neighbourhood, failure, refusal
from gymckpt.wire.gym import MCP_ACCESS_PATH

_ACCEPT = {"accept": "application/json, text/event-stream"}


@dataclass(slots=True)
class McpCaller:
    """Makes one session's calls."""

    neighbours: Neighbourhood
    server: ServerRef
    path: str
    headers: Mapping[str, str] = field(repr=False)
    """With the token; empty where there is none yet."""
    episode: EpisodeId
    timeout_s: float
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """What the tool answers, errors included, as text. Raises `NeighbourFailed` for a refusal."""
        if not self.headers:
            self.headers = await self._given_anew()
        message = {
            "jsonrpc": "2.0",
            "id": next(self._numbers),
            "method": "tools/call",
            "params": {"name": name, "arguments": arguments},
        }
        headers = {**_ACCEPT, **self.headers}
        reply = await self.neighbours.post(self.server, self.path, message, timeout_s=self.timeout_s, headers=headers)
        where = f"tool {name} on {self.server.instance}"
        if refusal(reply) is not None or reply.status != 200:
            raise failure(reply, where)
        return _text(reply, where)

    async def _given_anew(self) -> dict[str, str]:
        body = {"episode_id": {"rollout_id": self.episode.rollout_id, "attempt": self.episode.attempt}}
        headers = {"authorization": f"Bearer {self.neighbours.control_token}"}
        given, _ = await self.neighbours.post_json(
            self.server, MCP_ACCESS_PATH, body, timeout_s=self.timeout_s, headers=headers
        )
        access = given.get("resources_tools")
        named = access.get("headers") if isinstance(access, dict) else None
        if not isinstance(named, dict) or not named:
            raise NeighbourFailed(f"{self.server.instance} gave no MCP access", kind="bad_reply")
        return {str(name): str(value) for name, value in named.items()}


def _text(reply: Reply, where: str) -> str:
    try:
        message = jsoncodec.loads(reply.body)
    except ValueError as error:
        raise NeighbourFailed(f"{where} answered no JSON: {error}", kind="bad_reply") from error
    refused = message.get("error") if isinstance(message, dict) else None
    if isinstance(refused, dict):
        return jsoncodec.dumps({"error": refused.get("message")}).decode()
    result = message.get("result") if isinstance(message, dict) else None
    content = result.get("content") if isinstance(result, dict) else None
    if not isinstance(content, list):
        raise NeighbourFailed(f"{where} answered without content", kind="bad_reply")
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
