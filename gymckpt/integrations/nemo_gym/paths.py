"""Paths of a wrapped app: Gym's own code reads the rollout's prefix too, so it gets it back."""

from urllib.parse import quote

from gymckpt.participant.prefix import EPISODE, Scope
from gymckpt.wire.gym import rollout_path

CAPTURE_SEGMENT = "/training-token-capture"
"""What Gym puts between the prefix and the route where tokens are captured for training."""


def inner_scope(scope: Scope, keeps_prefix: bool) -> Scope:
    """`scope` as the wrapped app wants it: with the prefix that was taken off, if it reads one."""
    episode = scope.get("state", {}).get(EPISODE)
    if episode is None or not keeps_prefix:
        return scope
    path = rollout_path(episode, scope["path"])
    return {**scope, "path": path, "raw_path": quote(path).encode()}


def plain_route(path: str) -> str:
    """The route behind the capture segment, if there is one."""
    return path.removeprefix(CAPTURE_SEGMENT)
