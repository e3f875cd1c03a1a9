"""One tree of errors.

    GymckptError                     code, http_status, exit_code, hint
    ├── UsageError            exit 2    the command line, a task row, a setting
    ├── NotAsAsked            exit 3    another identity, an existing run, a lock held or lost
    ├── DamagedState          exit 4    bytes on disk that cannot be believed
    │   └── StorageFailed     exit 4    an fsync or a device failed: what was written is unknown
    ├── ServerError           exit 5    a server is unreachable, refuses, or speaks another language
    │   ├── BackendUnavailable exit 5   the inference backends are away or busy: no failure of any rollout
    │   ├── DeadlinePassed    exit 5    an exchange did not end in time: it may have been received
    │   └── NotSent           exit 5    the connection was refused: nobody received it
    ├── StoppedResumable      exit 75   a signal, a full disk: the run can go on later
    │   ├── NoSpace           exit 75
    │   └── StorageUnavailable    75   read-only, a stale handle, a failed read: perhaps only now
    └── ControlError          the control plane's refusals: `{"error": {"code", "detail"}}` with their HTTP status
        ├── 409 CheckpointFailed, StaleCheckpoint, CheckpointConflict, InvalidPhase, DeadlineExceeded, StaleAttempt,
        │       CheckpointParked, AdmissionClosed, RestartInScope, ActivationOutOfOrder, UnknownSession
        ├── 400 RolloutIdRequired, InvalidRolloutId
        ├── 401 Unauthorized
        ├── 422 InvalidCheckpointState
        └── 503 CoordinatorUnavailable

An error is one message: what, where, what to do (`hint`). It never holds a secret or a whole payload.
"""

from typing import ClassVar


class GymckptError(Exception):
    """Everything that gymckpt raises on purpose. Anything else that escapes is a bug (exit 70)."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 70

    def __init__(self, detail: str, *, hint: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = hint


class UsageError(GymckptError):
    """The command line, a task row or a setting is wrong; nothing was started."""

    code = "usage"
    http_status = 400
    exit_code = 2


class NotAsAsked(GymckptError):
    """The run directory holds something else than what was asked for, or another process holds it."""

    code = "not_as_asked"
    http_status = 409
    exit_code = 3


class DamagedState(GymckptError):
    """Bytes on disk are not what was written. Names the file, and the line, frame or episode where known."""

    code = "damaged_state"
    http_status = 422
    exit_code = 4


class StorageFailed(DamagedState):
    """A write or fsync failed so that nobody knows what reached the disk. Never retried and called good."""

    code = "storage_failed"


class ServerError(GymckptError):
    """A server cannot be reached, refuses us, or answers what it should not."""

    code = "server_error"
    http_status = 502
    exit_code = 5


class DeadlinePassed(ServerError):
    """An exchange with a server did not end before its deadline."""

    code = "deadline_passed"
    http_status = 504


class NotSent(ServerError):
    """The request provably reached nobody: the connection was refused. The very same request may be sent again."""

    code = "not_sent"
    http_status = 503


class BackendUnavailable(ServerError):
    """No inference backend could be had for as long as was waited: an outage, no failure of the rollout that met it."""

    code = "backend_unavailable"
    http_status = 503


class StoppedResumable(GymckptError):
    """The run stopped before its end; the same directory can be resumed."""

    code = "stopped"
    http_status = 503
    exit_code = 75


class NoSpace(StoppedResumable):
    """The disk or the quota is full. What was published before stands."""

    code = "no_space"


class StorageUnavailable(StoppedResumable):
    """A file cannot be read or written now (read-only, stale handle, permission): nothing is known to be lost."""

    code = "storage_unavailable"

    def __init__(self, detail: str, *, hint: str | None = None) -> None:
        super().__init__(detail, hint=hint or "when the cause is mended, give the same command again")


class ControlError(GymckptError):
    """A refusal of the control plane, with its code on the wire."""

    code = "checkpoint_error"
    http_status = 409
    exit_code = 5


class CheckpointFailed(ControlError):
    """The operation failed for a reason that has no code of its own."""


class StaleCheckpoint(ControlError):
    """The checkpoint id was already resumed, by its controller or by the end of its lease."""

    code = "stale_checkpoint"


class CheckpointConflict(ControlError):
    """Another checkpoint is active here, or the same operation was asked for with other arguments."""

    code = "checkpoint_conflict"


class InvalidPhase(ControlError):
    """The participant is not in a phase that allows the operation."""

    code = "invalid_phase"


class DeadlineExceeded(ControlError):
    """The operation's deadline passed, or had passed when it arrived."""

    code = "deadline_exceeded"


class StaleAttempt(ControlError):
    """The attempt was retired, or a later one was installed or sent."""

    code = "stale_attempt"


class CheckpointParked(ControlError):
    """Closed for a checkpoint; no work was begun: send the same again."""

    code = "checkpoint_parked"


class AdmissionClosed(ControlError):
    """No new episode is taken now; no work was begun: send the same again."""

    code = "admission_closed"


class RestartInScope(ControlError):
    """A commit named an episode that this participant reported as a restart."""

    code = "restart_in_scope"


class ActivationOutOfOrder(ControlError):
    """The activation index is neither the last completed one nor the next."""

    code = "activation_out_of_order"


class UnknownSession(ControlError):
    """The session is not held here, for example because the server was started again empty."""

    code = "unknown_session"


class RolloutIdRequired(ControlError):
    """A request that belongs to a rollout came without its capture key."""

    code = "rollout_id_required"
    http_status = 400


class InvalidRolloutId(ControlError):
    """A rollout id or capture key is not a safe name."""

    code = "invalid_rollout_id"
    http_status = 400


class Unauthorized(ControlError):
    """The bearer token is missing or wrong."""

    code = "unauthorized"
    http_status = 401


class InvalidCheckpointState(ControlError):
    """A checkpoint directory is missing, damaged or foreign, or could not be read or written."""

    code = "invalid_checkpoint_state"
    http_status = 422


class CoordinatorUnavailable(ControlError):
    """A worker of a server lost its coordinator."""

    code = "checkpoint_coordinator_unavailable"
    http_status = 503


CONTROL_ERRORS: dict[str, type[ControlError]] = {
    error.code: error
    for error in (
        CheckpointFailed,
        StaleCheckpoint,
        CheckpointConflict,
        InvalidPhase,
        DeadlineExceeded,
        StaleAttempt,
        CheckpointParked,
        AdmissionClosed,
        RestartInScope,
        ActivationOutOfOrder,
        UnknownSession,
        RolloutIdRequired,
        InvalidRolloutId,
        Unauthorized,
        InvalidCheckpointState,
        CoordinatorUnavailable,
    )
}
"""By code on the wire."""

NOT_STARTED_CODES = frozenset({CheckpointParked.code, AdmissionClosed.code})
"""Refusals given only before any work was begun: the caller sends the very same request again."""
