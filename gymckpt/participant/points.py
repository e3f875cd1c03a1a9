"""The crash points of a participant, and how to pass one without blocking the event loop."""

from gymckpt.crashpoints import crash_point, declare
from gymckpt.ports import Offload

PREPARE_AFTER_CLOSE = declare("prepare.after_close", "participant: admission is closed, readiness not looked at yet")
PREPARE_READY = declare("prepare.ready", "participant: found ready, not yet prepared")
COMMIT_BEFORE_EXPORT = declare("commit.before_export", "participant: commit accepted, nothing exported")
COMMIT_AFTER_EXPORT = declare("commit.after_export", "participant: everything exported, nothing under a final name")
COMMIT_AFTER_MANIFEST = declare("commit.after_manifest", "participant: manifest written, commit not answered")
RESTORE_AFTER_VALIDATE = declare("restore.after_validate", "participant: records read and checked, admission open")
RESTORE_BEFORE_INSTALL = declare("restore.before_install", "participant: admission closed, nothing installed")
RESTORE_AFTER_INSTALL = declare("restore.after_install", "participant: all installed, restore not answered")
RESUME_BEFORE_OPEN = declare("resume.before_open", "participant: id fenced and writes stopped, admission still closed")
RESUME_AFTER_OPEN = declare("resume.after_open", "participant: admission open, resume not answered")
RETIRE_AFTER_MARK = declare("retire.after_mark", "participant: attempts refused, nothing cancelled yet")
RETIRE_AFTER_FREE = declare("retire.after_free", "participant: nothing left of the attempts, retire not answered")
FORGET_AFTER_DROP = declare("forget.after_drop", "participant: marks dropped, forget not answered")


async def pass_point(offload: Offload, name: str) -> None:
    """Pass crash point `name` where blocking is fine, so that a hang holds only this operation."""
    await offload.run(lambda: crash_point(name))
