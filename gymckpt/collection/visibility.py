"""Whether every participant sees our directories: a file with a nonce, written here and read back there."""

import secrets
from collections.abc import Mapping
from pathlib import PurePath

from pydantic import SecretStr

from gymckpt import coordination
from gymckpt.coordination import NO_PATH_MAP, Deployment, ParticipantName, PathMap, describe
from gymckpt.coordination.calls import raise_failures
from gymckpt.errors import InvalidCheckpointState, ServerError
from gymckpt.ports import Deadline, FileSystem, Offload, Transport
from gymckpt.storage import durable


async def check_visible(
    deployment: Deployment,
    transport: Transport,
    token: SecretStr | None,
    directory: PurePath,
    deadline: Deadline,
    *,
    fs: FileSystem,
    offload: Offload,
    path_map: PathMap = NO_PATH_MAP,
) -> Mapping[ParticipantName, int]:
    """The bytes that each participant can still store in `directory` (absolute here, existing).

    Raises `ServerError` naming those that do not see it, and what writing raises (`NoSpace`, `StorageUnavailable`).
    Participants that do not offer the probe are not asked.
    """
    nonce = secrets.token_hex(16)
    path = directory / f"probe-{nonce}"

    def write() -> None:
        with durable.writing(path):
            handle = fs.create(path)
            try:
                handle.write(nonce.encode())
            finally:
                handle.close()

    await offload.run(write)
    try:
        answers = await coordination.probe(deployment, transport, token, path, nonce, deadline, path_map=path_map)
    finally:
        await offload.run(lambda: fs.unlink(path))
    refused = [failure for failure in answers.failures if isinstance(failure.error, InvalidCheckpointState)]
    raise_failures(failure for failure in answers.failures if failure not in refused)
    unseen = [p for p in deployment.participants if p.name in answers.replies and not answers.replies[p.name].seen]
    if blind := [*(failure.participant for failure in refused), *unseen]:
        told = "".join(f"; {failure.error.detail}" for failure in refused)
        raise ServerError(
            f"{describe(blind)} cannot see {path_map.seen_by(blind[0], directory)}{told}",
            hint="put the run where all servers see it, below their checkpoint.root; --path-map LOCAL=REMOTE where "
            "their mounts differ",
        )
    return {name: reply.free_bytes for name, reply in answers.replies.items()}
