"""One operation across all servers: the controller's half of the checkpoint control plane, as stateless functions.

A collector drives it, and so can a trainer:

    deployment = await discover(servers, transport, token, deadline, require_model=True)
    prepared = await prepare(deployment, transport, token, checkpoint_id, deadline)
    if prepared.ready:
        answers = await commit(..., checkpoint_dir=directory, episodes=scope)
        answers.require()
        (await renew(...)).require()
        cut = check_cut(...)          # what this checkpoint continues; publish it only now
    await resume(deployment, transport, token, checkpoint_id, deadline)

`restore` installs a checkpoint into fresh or emptied servers, all or nothing; `retire` and `forget` free episodes.
Every function is safe to repeat with the same checkpoint id. Ids are never used for two checkpoints.
"""

from gymckpt.coordination.calls import Answers, Failure
from gymckpt.coordination.cut import Committed, Cut, cannot_capture, check_cut, ended_at_cut, missing_in
from gymckpt.coordination.deployment import (
    NO_PATH_MAP,
    Deployment,
    ParticipantName,
    ParticipantRef,
    PathMap,
    PathMapping,
    describe,
)
from gymckpt.coordination.discovery import discover, probe, statuses
from gymckpt.coordination.operations import (
    Prepared,
    commit,
    failed,
    forget,
    prepare,
    renew,
    restore,
    resume,
    retire,
)

__all__ = [
    "NO_PATH_MAP",
    "Answers",
    "Committed",
    "Cut",
    "Deployment",
    "Failure",
    "ParticipantName",
    "ParticipantRef",
    "PathMap",
    "PathMapping",
    "Prepared",
    "cannot_capture",
    "check_cut",
    "commit",
    "describe",
    "discover",
    "ended_at_cut",
    "failed",
    "forget",
    "missing_in",
    "prepare",
    "probe",
    "renew",
    "restore",
    "resume",
    "retire",
    "statuses",
]
