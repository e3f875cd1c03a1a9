"""Which server receives which row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gymckpt.identity import Kind, TaskId
from gymckpt.ports import ServerRef


@dataclass(frozen=True, slots=True)
class Server:
    """A server of the deployment as far as it is known: its kind, and the agent that an environment is bound to."""

    ref: ServerRef
    kind: Kind | None = None
    agent: str | None = None
    models: frozenset[str] | None = None
    """Instances of the models that a verifier asks; None where nobody says."""
    tasksets: frozenset[str] | None = None
    """Task sets that an environment runs; None where nobody says."""

    def runs(self, taskset: str) -> bool:
        """Whether it may be an environment for this task set."""
        return self.kind == "environment" and (self.tasksets is None or taskset in self.tasksets)


@dataclass(frozen=True, slots=True)
class Routing:
    """Rows to servers. `routes` (task set or agent -> instance) decides; what it leaves open follows from the servers:
    an environment bound to the row's agent, the server of that agent's name, the only environment that may run the
    task set."""

    servers: tuple[Server, ...]
    routes: Mapping[str, str] = field(default_factory=dict)
    default_agent: str | None = None

    def any_named(self, like: Callable[[str], bool]) -> bool:
        """Whether `like` holds for the name of any server or bound agent."""
        return any(like(name) for server in self.servers for name in (server.ref.instance, server.agent or ""))

    def typed(self, task: TaskId) -> str:
        """The instance for a typed row; raises `LookupError` saying why there is none."""
        if named := self.routes.get(task.taskset):
            return self._known(named, f"task set {task.taskset!r}")
        environments = self._instances("environment")
        fitting = [server.ref.instance for server in self.servers if server.runs(task.taskset)]
        if len(fitting) == 1:
            return fitting[0]
        if not environments and len(self.servers) == 1:
            return self.servers[0].ref.instance
        if not environments and any(server.ref.instance == "environment" for server in self.servers):
            return "environment"
        raise LookupError(
            f"no route for task set {task.taskset[:80]!r}: {len(fitting)} of {len(environments)} known environment "
            f"servers may run it (--routes TASKSET=INSTANCE decides)"
        )

    def flat(self, row: Mapping[str, Any]) -> tuple[str, str | None]:
        """The instance for a flat row, and its agent; raises `LookupError` saying why there is none."""
        reference = row.get("agent_ref")
        agent = reference.get("name") if isinstance(reference, Mapping) else None
        agent = str(agent) if agent is not None else self.default_agent
        agents = self._instances("agent")
        if agent is None:
            agent = agents[0] if len(agents) == 1 else None
        if agent is None:
            raise LookupError("the row names no agent_ref, and there is not exactly one agent (--agent NAME decides)")
        if named := self.routes.get(agent):
            return self._known(named, f"agent {agent!r}"), agent
        for server in self.servers:
            if server.agent == agent:
                return server.ref.instance, agent
        return self._known(agent, f"agent {agent[:80]!r}"), agent

    def _known(self, instance: str, what: str) -> str:
        if any(server.ref.instance == instance for server in self.servers):
            return instance
        known = ", ".join(server.ref.instance for server in self.servers) or "none"
        raise LookupError(f"no route for {what}: no server {instance[:80]!r} is known (known: {known})")

    def _instances(self, kind: Kind) -> list[str]:
        return [server.ref.instance for server in self.servers if server.kind == kind]
