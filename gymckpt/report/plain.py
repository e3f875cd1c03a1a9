"""A checkpoint in the form of NeMo Gym's own participants, whole or not at all."""

from functools import partial
from pathlib import PurePath

from gymckpt.errors import NotAsAsked
from gymckpt.ports import FileSystem, Offload
from gymckpt.report.episodes import open_participant, participants
from gymckpt.storage import durable
from gymckpt.storage.plainexport import export_plain
from gymckpt.storage.published import PARTICIPANTS


async def export_checkpoint(fs: FileSystem, offload: Offload, checkpoint: PurePath, target: PurePath) -> int:
    """Write all records of `checkpoint` below `target`, made if missing; how many there are.

    They get their final names together, at the end. Raises `NotAsAsked` if `target` holds anything, `DamagedState`,
    and what writing raises.
    """
    await offload.run(partial(_make_empty, fs, target))
    temporary = durable.temporary_name(target / PARTICIPANTS)
    written = 0
    try:
        for kind, instance in await offload.run(partial(participants, fs, checkpoint)):
            reader = await open_participant(fs, offload, checkpoint, kind, instance)
            part = temporary / kind / instance
            manifest = await export_plain(fs, offload, reader, part, kind=kind, instance=instance)
            written += manifest["record_count"]
        await offload.run(partial(_name, fs, temporary, target / PARTICIPANTS))
    except BaseException:
        await offload.run(partial(_discard, fs, temporary))
        raise
    return written


def _make_empty(fs: FileSystem, target: PurePath) -> None:
    entry = durable.exists(fs, target)
    if entry is not None and entry.kind == "file":
        raise _not_empty(target)
    durable.make_directories(fs, target)
    with durable.reading(target):
        names = [found.name for found in fs.scan(target)]
    if not all(map(durable.is_temporary, names)):
        raise _not_empty(target)


def _name(fs: FileSystem, temporary: PurePath, final: PurePath) -> None:
    with durable.writing(final):
        try:
            fs.rename_exclusive(temporary, final)
        except FileExistsError as error:
            raise _not_empty(final.parent) from error
    durable.sync_directory(fs, final.parent)


def _discard(fs: FileSystem, temporary: PurePath) -> None:
    if durable.exists(fs, temporary) is not None:
        durable.remove_tree(fs, temporary)


def _not_empty(target: PurePath) -> NotAsAsked:
    return NotAsAsked(f"{target} is not an empty directory", hint="nothing was overwritten; give another --gym")
