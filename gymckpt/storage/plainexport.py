"""Writes a participant's records in the form of NeMo Gym's own participants, for tools and servers that read that."""

import hashlib
from functools import partial
from pathlib import PurePath
from typing import Any

from gymckpt import jsoncodec
from gymckpt.identity import Kind
from gymckpt.ports import FileSystem, Offload, WriteHandle
from gymckpt.storage import durable
from gymckpt.storage.manifest import MANIFEST
from gymckpt.storage.reader import ParticipantReader


async def export_plain(
    fs: FileSystem, offload: Offload, reader: ParticipantReader, directory: PurePath, *, kind: Kind, instance: str
) -> dict[str, Any]:
    """All records of an open `reader` into `directory` (`<target>/gym/<kind>/<instance>`, made if missing).

    One record is in memory at a time. Returns the manifest. Raises `NotAsAsked` if other content is there.
    """
    temporary = durable.temporary_name(directory / "records")
    await offload.run(partial(durable.make_directories, fs, directory))
    digest, count = hashlib.sha256(), 0
    with durable.writing(directory):
        handle: WriteHandle = await offload.run(partial(fs.create, temporary))
    try:
        async for stored in reader.records():
            line = await offload.run(partial(_write, handle, directory, stored.record))
            digest.update(line)
            count += 1
        await offload.run(partial(durable.sync, handle, temporary))
        name = f"records-{digest.hexdigest()}.jsonl"
        manifest = {
            "schema_version": 1,
            "kind": kind,
            "instance": instance,
            "checkpoint_id": reader.checkpoint_id,
            "records_file": name,
            "records_sha256": digest.hexdigest(),
            "record_count": count,
        }
        await offload.run(partial(durable.name_finally, fs, temporary, directory / name))
        await offload.run(partial(durable.sync_directory, fs, directory))
        await offload.run(partial(durable.write_new, fs, directory / MANIFEST, jsoncodec.dumps(manifest) + b"\n"))
        return manifest
    finally:
        handle.close()
        await offload.run(partial(durable.remove_quietly, fs, temporary))


def _write(handle: WriteHandle, directory: PurePath, record: dict[str, Any]) -> bytes:
    line = jsoncodec.dumps(record) + b"\n"
    with durable.writing(directory):
        handle.write(line)
    return line
