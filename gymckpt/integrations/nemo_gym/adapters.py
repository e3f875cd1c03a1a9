"""What a checkpoint can hold of a Gym resources server's sessions: an adapter per server class, the class unchanged.

An adapter states the two modes that `servers.resources.server.ResourcesServer` states, and has the same hooks; the
server's own object is at hand as `self.server`.
"""

import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, cast

from gymckpt.jsoncodec import Json
from gymckpt.servers.resources.server import ResourcesServer, SessionLost


class Adapter(ResourcesServer):
    """The sessions of one Gym resources server. By itself: `restart_only`, its episodes start over after a crash."""

    seed_routes: ClassVar[frozenset[str]] = frozenset({"/seed_session", "/reset"})
    """Routes that begin a session."""
    close_routes: ClassVar[frozenset[str]] = frozenset({"/close_session", "/close"})
    free_routes: ClassVar[frozenset[str]] = frozenset({"/aggregate_metrics", "/reverify_mode"})
    """Routes that belong to no session and change nothing."""

    def __init__(self, instance: str, server: Any) -> None:
        super().__init__(instance)
        self.server = server
        self.close_inside: Callable[[str], Awaitable[None]] | None = None
        """Closes a session through the server's own route; set by whoever wraps it."""

    async def retire_session_state(self, session_id: str) -> None:
        """Free the session, by the server's own close where it has one."""
        if self.close_inside is not None:
            await self.close_inside(session_id)


class StatelessReplay(Adapter):
    """A verifier that looks at the answer alone, and may be asked again."""

    checkpoint_mode = "stateless"
    checkpoint_verify = "replay"


class ComparedCohorts(StatelessReplay):
    """A verifier that waits for all answers to one prompt, and gives their verdicts together."""

    compares_cohorts = True


class Counters(Adapter):
    """`example_session_state_mgmt`: one number a session, which the reward depends on."""

    checkpoint_mode = "exported"
    checkpoint_verify = "replay"

    @property
    def _counters(self) -> dict[str, int]:
        return cast(dict[str, int], self.server.session_id_to_counter)

    async def export_session_state(self, session_id: str) -> Json:
        if session_id not in self._counters:
            raise SessionLost(f"no counter of session {session_id}")
        return self._counters[session_id]

    async def validate_session_state(self, session_id: str, state: Json) -> None:
        if isinstance(state, bool) or not isinstance(state, int):
            raise ValueError("a counter is an integer")

    async def restore_session_state(self, session_id: str, state: Json) -> None:
        self._counters[session_id] = cast(int, state)

    async def retire_session_state(self, session_id: str) -> None:
        self._counters.pop(session_id, None)
        await super().retire_session_state(session_id)


class Blackjack(Adapter):
    """`blackjack`: both hands, and the generator that deals the next card."""

    checkpoint_mode = "exported"

    @property
    def _tables(self) -> dict[str, dict[str, Any]]:
        return cast(dict[str, dict[str, Any]], self.server.session_state)

    async def export_session_state(self, session_id: str) -> Json:
        table = self._tables.get(session_id)
        if table is None:
            raise SessionLost(f"no hand of session {session_id}")
        version, words, gauss = table["rng"].getstate()
        return {
            "player": list(table["player"]),
            "dealer": list(table["dealer"]),
            "rng": [version, list(words), gauss],
        }

    async def validate_session_state(self, session_id: str, state: Json) -> None:
        _table(state)

    async def restore_session_state(self, session_id: str, state: Json) -> None:
        self._tables[session_id] = _table(state)

    async def retire_session_state(self, session_id: str) -> None:
        self._tables.pop(session_id, None)
        await super().retire_session_state(session_id)


def _table(state: Json) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise ValueError("a hand is an object")
    hands = {who: state.get(who) for who in ("player", "dealer")}
    for who, hand in hands.items():
        if not isinstance(hand, list) or not all(isinstance(card, str) for card in hand):
            raise ValueError(f"{who}: a hand is a list of cards")
    match state.get("rng"):
        case [int(version), list(words), gauss]:
            dealing = random.Random()  # noqa: S311 - the server's own kind of generator
            try:
                dealing.setstate((version, tuple(words), gauss))
            except TypeError as error:
                raise ValueError(f"rng: {error}") from error
        case _:
            raise ValueError("rng: not the state of a generator")
    return {**hands, "rng": dealing}


ADAPTERS: Mapping[str, type[Adapter]] = {
    "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer": Counters,
    "resources_servers.blackjack.app:BlackjackEnv": Blackjack,
}
"""Adapters for server classes that NeMo Gym ships, by `module:class`."""
