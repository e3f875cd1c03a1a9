"""What a class of resources servers says of itself is checked before it serves: not at the first crash."""

from typing import Any, get_args

from gymckpt.errors import UsageError
from gymckpt.servers.resources.server import ResourcesServer
from gymckpt.wire.control import ResourcesMode, VerifyMode

_NEEDED = (
    ("export_session_state", "export_session_states"),
    ("restore_session_state", "restore_session_states"),
)
"""Hooks of an `exported` server, each alone or for a batch."""


def check_declared(server: ResourcesServer | type[ResourcesServer]) -> None:
    """Raise `UsageError`, naming class and attribute or hook, if what is stated cannot hold together."""
    name = (server if isinstance(server, type) else type(server)).__qualname__
    for attribute, allowed in (("checkpoint_mode", ResourcesMode), ("checkpoint_verify", VerifyMode)):
        stated: Any = getattr(server, attribute)
        if stated not in get_args(allowed):
            raise UsageError(f"{name}.{attribute} is {stated!r:.80}: it must be one of {', '.join(get_args(allowed))}")
    mode, verify = server.checkpoint_mode, server.checkpoint_verify
    if server.compares_cohorts and (mode, verify) != ("stateless", "replay"):
        raise UsageError(
            f"{name}.compares_cohorts is set on a server that is {mode}, verify {verify}: "
            "it must be stateless, verify replay",
            hint="an answer that waits for its siblings would hold up every checkpoint",
        )
    if mode == "exported":
        for single, batch in _NEEDED:
            if not (_has(server, single) or _has(server, batch)):
                raise UsageError(
                    f"{name}.checkpoint_mode is exported, but it has no {single}",
                    hint="write that hook, or leave the mode at restart_only",
                )


def _has(server: ResourcesServer | type[ResourcesServer], hook: str) -> bool:
    """Whether the hook is another one than the base's, which does nothing."""
    own = getattr(server, hook)
    return getattr(own, "__func__", own) is not getattr(ResourcesServer, hook)
