"""What must hold of a simulated run once it is over, whatever happened in it."""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gymckpt import jsoncodec
from gymckpt.crashpoints import CRASH_POINTS
from gymckpt.errors import DamagedState, GymckptError
from gymckpt.participant.role import Role
from gymckpt.storage.checkpoints import CheckpointDirectory
from tests.process.history import History, outcomes
from tests.simulation.deployment import AUDITED, GRACE_S, PARTICIPANTS, RUN, Deployment, remove
from tests.simulation.office import Job
from tests.simulation.processes import ProcessOffload

LONGEST_LEASE_S = 3600.0 + GRACE_S


@dataclass(frozen=True)
class Undisturbed:
    """What a run that nobody touched gave."""

    outcomes: dict[tuple[int, int], Any]
    calls: dict[str, Counter[tuple[int, ...]]]


@functools.lru_cache(maxsize=256)
def undisturbed(jobs: tuple[Job, ...], replayed: bool) -> Undisturbed:
    """The reference for these jobs."""
    world = Deployment(jobs, replayed=replayed, checkpoint_every="off")
    try:
        life = world.run(world.finish(1))
        assert life.error is None
        assert life.summary is not None
        assert life.summary.exit_code == 0
        root = world.copy_out()
        try:
            history = history_of(root)
            return Undisturbed(rows(world), {server: history.calls_that_counted(server) for server in AUDITED})
        finally:
            remove(root)
    finally:
        world.close()


def history_of(root: Any) -> History:
    """The independent checker of a run that was copied out."""
    return History(root / "run", {name: root / f"audit-{name}.jsonl" for name in AUDITED})


def rows(world: Deployment) -> dict[tuple[int, int], Any]:
    """The rows of rollouts.jsonl, without what is volatile."""
    return outcomes([jsoncodec.loads(line) for line in (world.disk.find(RUN / "rollouts.jsonl") or b"").splitlines()])


def check(world: Deployment, replayed: bool = False) -> int:
    """Assert every promise about a run that `finish` brought to its end; gives the number of restored attempts."""
    check_ends(world)
    check_accounts(world)
    check_resumed(world)
    world.run(check_published(world))
    restored = check_lineage(world, undisturbed(tuple(world.jobs), replayed))
    world.run(check_admission(world))
    assert world.surprises() == []
    return restored


def check_ends(world: Deployment) -> None:
    """Collectors end with a summary or with an error of the tree that is no bug and no damage."""
    for life in world.lives:
        if life.error is not None and not _injected(life.error):
            assert isinstance(life.error, GymckptError), repr(life.error)
            assert type(life.error) is not GymckptError, life.error.detail
            assert not isinstance(life.error, DamagedState) or life.error.code == "storage_failed", life.error.detail


def _injected(error: BaseException) -> bool:
    """Whether a crash point raised it: then it is named as its file."""
    return isinstance(error, OSError) and error.filename in CRASH_POINTS


def check_accounts(world: Deployment) -> None:
    """Everything planned has succeeded, and the sets add up."""
    last = world.life.summary
    assert last is not None, world.life.error
    assert last.exit_code == 0, last
    assert (last.counts.planned, last.counts.succeeded) == (len(world.jobs), len(world.jobs)), last
    assert (last.counts.failed, last.counts.omitted, last.counts.unresolved) == (0, 0, 0)
    for life in world.lives:
        if life.summary is not None:
            counts = life.summary.counts
            assert counts.planned == counts.succeeded + counts.failed + counts.omitted + counts.unresolved


def check_resumed(world: Deployment) -> None:
    """No manifest appeared or changed after its participant had resumed; it may have been removed with the rest."""
    for (server, checkpoint_id), before in world.resumed.items():
        now = world.manifest(server, checkpoint_id)
        assert now is None or now == before, f"{server} wrote into {checkpoint_id} after its resume"


async def check_published(world: Deployment) -> None:
    """Every checkpoint that counts is whole."""
    directory = CheckpointDirectory(world.disk, ProcessOffload(), RUN / "checkpoints")
    for listed in await directory.listing():
        if listed.published is not None:
            problems = await directory.verify(listed.published)
            assert problems == [], problems


def check_lineage(world: Deployment, reference: Undisturbed) -> int:
    """Outcomes as undisturbed, one each; restored attempts go on right after their boundaries."""
    assert rows(world) == reference.outcomes
    root = world.copy_out()
    try:
        history = history_of(root)
        history.observe()
        restored = history.check()
        for server in AUDITED:
            assert history.calls_that_counted(server) == reference.calls[server], server
        return restored
    finally:
        remove(root)


async def check_admission(world: Deployment) -> None:
    """Admission is open exactly where nothing is under way; once all leases have ended, that is everywhere."""
    check_gates(world)
    end_s = world.loop.time() + LONGEST_LEASE_S
    await world.until_quiet(end_s)
    for name in PARTICIPANTS:
        participant = world.servers[name].participant
        assert participant is not None
        assert participant.phase == "idle", f"{name} is {participant.phase}"
    check_gates(world)


def check_gates(world: Deployment) -> None:
    """The invariant that holds at any moment."""
    for name, server in world.servers.items():
        participant = server.participant
        if participant is None or server.process.dead:
            continue
        gates = list(gates_of(participant.role))
        assert gates or name == "shell", name
        if participant.phase == "idle":
            assert all(gate.is_open for gate in gates), f"{name} is idle and closed"
        elif name != "shell":
            assert not any(gate.is_open for gate in gates), f"{name} is {participant.phase} and open"


def gates_of(role: Role) -> Iterator[Any]:
    """What a role closes."""
    for path in ("_gate", "_serving.gate", "_floor"):
        found: Any = role
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            yield found
