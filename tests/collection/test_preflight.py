"""What is looked at before the first request, and what a person is told of it."""

import asyncio
from pathlib import Path

import pytest

from gymckpt.collection.preflight import Preflight, preflight
from gymckpt.collection.routing import Server
from gymckpt.coordination import NO_PATH_MAP, Deployment, ParticipantRef
from gymckpt.ports import ServerRef, SystemClock, ThreadOffload
from gymckpt.storage.files import LocalFileSystem
from gymckpt.wire.control import ResourcesMode, VerifyMode
from tests.simulation.transport import MemoryNetwork

JUDGE, POLICY = ServerRef("judge", "http://judge"), ServerRef("policy", "http://policy")


def look(directory: Path, *, mode: ResourcesMode, verify: VerifyMode, models: frozenset[str] | None) -> Preflight:
    """A preflight of a policy model and a verifier, neither of which is asked anything."""
    network = MemoryNetwork()
    deployment = Deployment(
        (
            ParticipantRef(POLICY, "model", "policy"),
            ParticipantRef(JUDGE, "resources", "judge", mode=mode, verify=verify, skew_s=7.0),
        )
    )
    servers = (Server(POLICY, "model"), Server(JUDGE, "resources", models=models))
    looking = preflight(
        servers,
        deployment,
        network,
        None,
        SystemClock(),
        LocalFileSystem(),
        ThreadOffload(),
        directory,
        NO_PATH_MAP,
        checkpoints=True,
        timeout_s=1.0,
    )
    return asyncio.run(looking)


def waits(directory: Path, mode: ResourcesMode, verify: VerifyMode, models: frozenset[str] | None) -> list[str]:
    looked = look(directory, mode=mode, verify=verify, models=models)
    return [text for text in looked.warnings if "verifies in wait mode" in text]


def test_a_verifier_that_waits_for_the_policy_is_warned_of(tmp_path: Path) -> None:
    (told,) = waits(tmp_path, "exported", "wait", frozenset({"policy"}))
    assert "asks model policy" in told


def test_a_verifier_of_which_nobody_says_whom_it_asks_is_warned_of_too(tmp_path: Path) -> None:
    (told,) = waits(tmp_path, "exported", "wait", None)
    assert "may ask model policy" in told


@pytest.mark.parametrize(
    ("mode", "verify", "models"),
    [
        ("exported", "wait", frozenset({"another"})),
        ("exported", "wait", frozenset[str]()),
        ("stateless", "replay", frozenset({"policy"})),
        ("restart_only", "wait", frozenset({"policy"})),
    ],
)
def test_a_verifier_that_holds_up_no_checkpoint_is_not_warned_of(
    tmp_path: Path, mode: ResourcesMode, verify: VerifyMode, models: frozenset[str]
) -> None:
    assert waits(tmp_path, mode, verify, models) == []


def test_a_clock_that_differs_is_named_with_how_far(tmp_path: Path) -> None:
    looked = look(tmp_path, mode="stateless", verify="replay", models=None)
    assert any("resources judge differs from ours by +7 s" in text for text in looked.warnings)
