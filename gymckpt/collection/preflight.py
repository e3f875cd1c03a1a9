"""Everything that can be known to go wrong is looked at before the first request: servers, paths, space, cohorts."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from pydantic import SecretStr

from gymckpt import coordination
from gymckpt.collection.routing import Server
from gymckpt.coordination import Deployment, PathMap
from gymckpt.errors import ServerError
from gymckpt.ports import Clock, Deadline, FileSystem, Offload, Transport
from gymckpt.storage.durable import check_space, remove_quietly, write_new

LEAST_FREE_BYTES = 64 << 20
SKEW_WARNING_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a person should know before the run begins."""

    level: Literal["fact", "warning"]
    text: str


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found; whatever would make the run impossible was raised instead."""

    findings: tuple[Finding, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(finding.text for finding in self.findings if finding.level == "warning")


async def preflight(
    servers: Sequence[Server],
    deployment: Deployment,
    transport: Transport,
    token: SecretStr | None,
    clock: Clock,
    fs: FileSystem,
    offload: Offload,
    root: PurePath,
    path_map: PathMap,
    *,
    checkpoints: bool,
    timeout_s: float,
) -> Preflight:
    """Look at the servers and at `root`, which must exist. `checkpoints`: whether the run will take any.

    Raises `ServerError` for a participant that does not see `root`, `NoSpace` where nothing could be written.
    """
    await offload.run(lambda: check_space(fs, root, LEAST_FREE_BYTES, "free space, then give the same command again"))
    findings = [_fact(text) for text in _roles(deployment)]
    findings += [
        _warning(text) for text in (*_skews(deployment), *(_waits(servers, deployment) if checkpoints else ()))
    ]
    if checkpoints and deployment.participants:
        limit = Deadline.after(clock, timeout_s)
        findings += await _seen(deployment, transport, token, fs, offload, root, path_map, limit)
    return Preflight(tuple(findings))


async def _seen(
    deployment: Deployment,
    transport: Transport,
    token: SecretStr | None,
    fs: FileSystem,
    offload: Offload,
    root: PurePath,
    path_map: PathMap,
    limit: Deadline,
) -> list[Finding]:
    """A file that each participant must find through its own mounts."""
    nonce = secrets.token_hex(16)
    path = root / f".{nonce}.tmp"
    await offload.run(lambda: write_new(fs, path, nonce.encode()))
    try:
        answers = await coordination.probe(deployment, transport, token, path, nonce, limit, path_map=path_map)
    finally:
        await offload.run(lambda: remove_quietly(fs, path))
    for failure in answers.failures:
        raise failure.error
    findings = [_warning(f"cannot ask {p} whether it sees {root}") for p in answers.unreached]
    for participant in deployment.participants:
        reply = answers.replies.get(participant.name)
        if reply is not None and not reply.seen:
            raise ServerError(
                f"{participant} does not see {root}: a checkpoint could not be written",
                hint="share it, let the server's checkpoint root cover it, or map it: --path-map LOCAL=REMOTE",
            )
        if reply is not None and reply.free_bytes < LEAST_FREE_BYTES:
            findings.append(_warning(f"{participant} has only {reply.free_bytes >> 20} MiB free for checkpoints"))
    return findings


def _roles(deployment: Deployment) -> list[str]:
    """What will be continued after a crash and what will start over, server by server."""
    told = []
    for participant in deployment.participants:
        if participant.mode == "restart_only":
            told.append(f"{participant}: cannot capture its sessions; episodes that use it start over after a crash")
        elif participant.kind == "resources":
            how = "again after a crash" if participant.verify == "replay" else "to its end before a checkpoint"
            told.append(f"{participant}: episodes continue after a crash; verification runs {how}")
        else:
            told.append(f"{participant}: episodes continue after a crash")
    told += [
        f"{server.instance}: no control plane; its episodes start over after a crash" for server in deployment.plain
    ]
    return told


def _skews(deployment: Deployment) -> list[str]:
    return [
        f"the clock of {participant} differs from ours by {participant.skew_s:+.0f} s"
        for participant in deployment.participants
        if abs(participant.skew_s) > SKEW_WARNING_S
    ]


def _waits(servers: Sequence[Server], deployment: Deployment) -> list[str]:
    """Verifiers that a checkpoint waits for, and that wait for a model which it closes. Where nobody says which models
    a verifier asks, only a person can rule it out."""
    asked = {server.ref.instance: server.models for server in servers}
    models = [participant for participant in deployment.participants if participant.kind == "model"]
    told = []
    for verifier in deployment.participants:
        if verifier.kind != "resources" or verifier.verify != "wait" or verifier.mode == "restart_only":
            continue
        known = asked.get(verifier.server.instance)
        told += [
            f"{verifier} verifies in wait mode and {'may ask' if known is None else 'asks'} {model}: a checkpoint that "
            "closes the one waits for the other; another judge, or verify in replay mode, rules it out"
            for model in models
            if known is None or model.server.instance in known
        ]
    return told


def _fact(text: str) -> Finding:
    return Finding("fact", text)


def _warning(text: str) -> Finding:
    return Finding("warning", text)
