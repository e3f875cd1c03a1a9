"""The same promises on real disks: power cuts on loop devices, a full tmpfs, SIGKILL at every system call.

The cuts use the file system's own shutdown without log flush: what was not fsynced is gone. They need root and loop
devices, and are skipped elsewhere with the reason.
"""

import asyncio
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tests.storage.workload as workload
from gymckpt.crashpoints import CRASH_POINTS, ENVIRONMENT_VARIABLE
from gymckpt.storage import checkpoints, durable, journal, segments, writer
from gymckpt.storage.checkpoints import CheckpointDirectory, Collection
from tests.mounts import command, mounted, needs_root
from tests.storage.building import RUN_ID, checkpoint_id, record

SHUTDOWN = 0x8004587D
WITHOUT_LOG_FLUSH = 2
POINTS = sorted(
    {
        name
        for module in (writer, segments, checkpoints, journal)
        for name in vars(module).values()
        if isinstance(name, str) and name in CRASH_POINTS
    }
)
"""Those of storage alone: other modules declare theirs as soon as any test imports them."""
UNUSED = {"commit.merged.before_link", "commit.prefixes.before_link"}
"""Not on the way of so small a run."""


def run_workload(directory: Path, crash_at: str | None, *before: str) -> tuple[int, list[str]]:
    environment = {**os.environ, **({ENVIRONMENT_VARIABLE: crash_at} if crash_at else {})}
    done = subprocess.run(
        [*before, sys.executable, "-m", "tests.storage.workload", str(directory)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def make_image(kind: str, tmp_path: Path) -> Path:
    needs_root()
    maker = shutil.which(f"mkfs.{kind}")
    if maker is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate((320 if kind == "xfs" else 32) << 20)
    made = command(maker, "-q", image)
    if made.returncode:
        pytest.skip(f"mkfs.{kind}: {made.stderr.strip()}")
    return image


def mount_options(kind: str) -> tuple[str, str]:
    """So that nothing becomes durable by itself while a test runs."""
    return "-o", "loop,commit=300" if kind == "ext4" else "loop"


def cut_power(place: Path) -> None:
    fd = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", WITHOUT_LOG_FLUSH))
    except OSError as error:
        pytest.skip(f"this file system cannot be shut down: {error}")
    finally:
        os.close(fd)


@pytest.mark.power
@pytest.mark.parametrize("passage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("point", [*POINTS, "nowhere"])
def test_a_real_power_cut_at_a_crash_point_loses_nothing_that_was_reported(
    point: str, kind: str, passage: int, tmp_path: Path
) -> None:
    image = make_image(kind, tmp_path)
    with mounted(image, tmp_path / "disk", *mount_options(kind)) as place:
        code, said = run_workload(place / "run", f"{point}:kill:{passage}")
        assert code == (0 if point in {*UNUSED, "nowhere"} else -9)
        cut_power(place)
    with mounted(image, tmp_path / "disk", "-o", "loop") as place:
        asyncio.run(workload.check(place / "run", said))


def make_tree(path: Path) -> None:
    durable.make_directories(workload.FS, path / "tree")
    for name in ("first", "second"):
        durable.write_new(workload.FS, path / "tree" / name, name.encode())


async def commit(path: Path) -> None:
    part = CheckpointDirectory(workload.FS, workload.OFFLOAD, path / "checkpoints")
    place = Path(await part.begin(checkpoint_id(1))) / "gym" / "agent" / "a"
    writing = writer.ParticipantWriter(
        workload.FS, workload.OFFLOAD, place, checkpoint_id=checkpoint_id(1), kind="agent", instance="a"
    )
    await writing.add(record("r", [1, 2]))
    await writing.finish()


async def publish(path: Path) -> None:
    await commit(path)
    made = CheckpointDirectory(workload.FS, workload.OFFLOAD, path / "checkpoints")
    await made.publish(checkpoint_id(1), Collection(checkpoint_id(1), RUN_ID, 1, 1, 1.0))


STEPS: dict[str, tuple[Callable[[Path], object], Callable[[Path], bool]]] = {
    "write_new": (
        lambda path: durable.write_new(workload.FS, path / "file", b"new"),
        lambda path: (path / "file").read_bytes() == b"new",
    ),
    "replace_file": (
        lambda path: durable.replace_file(workload.FS, path / "tree" / "first", b"new"),
        lambda path: (path / "tree" / "first").read_bytes() == b"new",
    ),
    "make_directories": (
        lambda path: durable.make_directories(workload.FS, path / "a" / "b" / "c"),
        lambda path: (path / "a" / "b" / "c").is_dir(),
    ),
    "remove_tree": (
        lambda path: durable.remove_tree(workload.FS, path / "tree", "first"),
        lambda path: not (path / "tree").exists(),
    ),
    "commit": (
        lambda path: asyncio.run(commit(path)),
        lambda path: (path / "checkpoints" / checkpoint_id(1) / "gym" / "agent" / "a" / "manifest.json").is_file(),
    ),
    "publish": (
        lambda path: asyncio.run(publish(path)),
        lambda path: (path / "LATEST").read_text() == f"{checkpoint_id(1)}\n",
    ),
}
"""What is done, and how one sees afterwards that it was. Nothing that a later step writes may make an earlier one
durable: the journal of a file system takes whatever was changed before along with any fsync."""


@pytest.mark.power
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("step", STEPS)
def test_each_durable_step_alone_survives_a_power_cut_right_after_it(step: str, kind: str, tmp_path: Path) -> None:
    image = make_image(kind, tmp_path)
    do, was_done = STEPS[step]
    with mounted(image, tmp_path / "disk", *mount_options(kind)) as place:
        make_tree(place)
        command("sync", "--file-system", place)
        do(place)
        cut_power(place)
    with mounted(image, tmp_path / "disk", "-o", "loop") as place:
        assert was_done(place)


@pytest.mark.power
@pytest.mark.parametrize("size_kib", range(64, 260, 12))
def test_a_full_disk_stops_with_its_exit_code_and_loses_nothing(size_kib: int, tmp_path: Path) -> None:
    needs_root()
    with mounted(Path("tmpfs"), tmp_path / "disk", "-t", "tmpfs", "-o", f"size={size_kib}k") as place:
        code, said = run_workload(place / "run", None)
        assert code in (0, 75)
        grown = command("mount", "-o", "remount,size=10m", place)
        assert grown.returncode == 0
        asyncio.run(workload.check(place / "run", said))


CALLS = ("write", "fsync", "ftruncate", "linkat", "rename", "renameat2", "unlink", "mkdir", "rmdir")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("call", CALLS)
def test_a_kill_at_any_system_call_loses_nothing_that_was_reported(call: str, tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    for number in range(1, 200):
        place = tmp_path / str(number)
        place.mkdir()
        tracing = ("-o", os.devnull, "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={number}")
        code, said = run_workload(place / "run", None, "strace", "-f", "-qq", *tracing)
        if code == 0:
            assert said[-1] == f"published {workload.CHECKPOINTS}"
            assert number > 1 or call in ("ftruncate", "renameat2")
            return
        if code not in (-9, 137):
            pytest.skip(f"strace cannot trace here: exit code {code}")
        asyncio.run(workload.check(place / "run", said))
        shutil.rmtree(place)
    pytest.fail("the workload never ended")


def test_the_workload_reports_what_it_did(tmp_path: Path) -> None:
    code, said = run_workload(tmp_path / "run", None)
    assert code == 0
    assert said == [f"{what} {n}" for n in range(1, workload.CHECKPOINTS + 1) for what in ("appended", "published")]
    asyncio.run(workload.check(tmp_path / "run", said))
