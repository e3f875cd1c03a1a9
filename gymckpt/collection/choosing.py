"""What a restore stands on, and what it tells of the checkpoints that it passes over."""

from collections.abc import Sequence

from gymckpt.collection.candidates import find_lost, with_salvaged
from gymckpt.collection.host import JournalHost
from gymckpt.collection.opening import Opened, Ports
from gymckpt.collection.recovery import Candidate
from gymckpt.collection.settings import CollectSettings
from gymckpt.errors import DamagedState
from gymckpt.identity import checkpoint_sequence
from gymckpt.storage.problems import Problem

FEW = 3
"""Of many checkpoints that are gone only the newest are named."""


async def choose(
    opened: Opened, host: JournalHost, settings: CollectSettings, ports: Ports
) -> tuple[Sequence[Candidate], list[str]]:
    """The checkpoints to stand on, newest first, and what a person should know of newer ones.

    Raises `DamagedState` where something was published, nothing of it is whole, and work is left: starting over is for
    the user to say.
    """
    candidates, lost, salvaged = opened.candidates, await _lost(opened), list[str]()
    if settings.salvage and opened.problems:
        candidates, salvaged = await with_salvaged(
            opened.checkpoints, host, ports.fs, ports.offload, ports.clock, candidates
        )
    has_work = next(opened.run.unresolved_ids(), None) is not None
    if (opened.problems or lost) and not candidates and not settings.start_over and has_work:
        told = "; ".join([*map(str, (*opened.problems, *lost)[:FEW]), *salvaged])
        more = "" if settings.salvage else "; --salvage keeps what is whole"
        raise DamagedState(
            f"no checkpoint of this run is whole: {told}",
            hint=f"--start-over begins unfinished rollouts from the input again{more}",
        )
    notes = [f"passed over: {problem}" for problem in (*opened.problems, *lost[:FEW])]
    if len(lost) > FEW:
        notes.append(f"passed over: {len(lost) - FEW} more that are not there")
    if opened.problems and candidates and not settings.salvage:
        notes.append("--salvage instead goes on from what can be read of the newest damaged checkpoint")
    return candidates, [*notes, *salvaged]


async def _lost(opened: Opened) -> list[Problem]:
    """What is not there of the checkpoints that are newer than the one to stand on, newest first."""
    lost = await find_lost(opened.checkpoints, opened.run)
    newest = checkpoint_sequence(opened.candidates[0].checkpoint_id) if opened.candidates else 0
    return [problem for name, problem in reversed(lost.items()) if checkpoint_sequence(name) > newest]
