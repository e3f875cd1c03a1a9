"""The machine's own file system through the port, and what is known of where a directory lies."""

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from gymckpt.errors import DamagedState, NotAsAsked
from gymckpt.identity import EpisodeId
from gymckpt.ports import ThreadOffload
from gymckpt.storage import durable
from gymckpt.storage.files import LocalFileSystem, replace_file, write_new
from gymckpt.storage.mounts import file_system_of, is_network, warning_for
from gymckpt.storage.reader import ParticipantReader
from gymckpt.storage.writer import ParticipantWriter
from tests.storage.building import record

FS = LocalFileSystem()


def test_a_new_file_is_private_whole_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_new(FS, path, b"content")
    write_new(FS, path, b"content")
    assert path.read_bytes() == b"content"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(NotAsAsked):
        write_new(FS, path, b"other")
    with pytest.raises(NotAsAsked):
        write_new(FS, path, b"longer than before")
    assert [entry.name for entry in FS.scan(tmp_path)] == ["file"]
    replace_file(FS, path, b"replaced")
    assert path.read_bytes() == b"replaced"


def test_directories_are_private_unless_the_group_may_read(tmp_path: Path) -> None:
    durable.make_directories(FS, tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    shared = LocalFileSystem(group_readable=True)
    durable.make_directories(shared, tmp_path / "c")
    write_new(shared, tmp_path / "c" / "f", b"")
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) & 0o750 == 0o750
    assert stat.S_IMODE((tmp_path / "c" / "f").stat().st_mode) & 0o640 == 0o640


def test_symlinks_pipes_and_sockets_are_not_files(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
    for name in ("link", "pipe", "socket"):
        assert FS.stat(tmp_path / name).kind == "other"
        with pytest.raises(OSError):
            FS.append(tmp_path / name)
        with pytest.raises(OSError):
            FS.create(tmp_path / name)
        with pytest.raises(DamagedState, match="not a regular file"):
            durable.read_small(FS, tmp_path / name)


def test_an_exclusive_rename_never_replaces(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    with pytest.raises(FileExistsError):
        FS.rename_exclusive(tmp_path / "a", tmp_path / "b")
    FS.rename_exclusive(tmp_path / "a", tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    held = FS.lock(tmp_path / "LOCK")
    with pytest.raises(BlockingIOError):
        FS.lock(tmp_path / "LOCK")
    held.release()
    FS.lock(tmp_path / "LOCK").release()


def test_reading_takes_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    assert FS.read(tmp_path / "f") == b"0123456789"
    assert FS.read(tmp_path / "f", 8, 100) == b"89"
    assert FS.read(tmp_path / "f", 100, 5) == b""
    FS.truncate(tmp_path / "f", 3)
    handle = FS.append(tmp_path / "f")
    handle.write(b"x")
    handle.close()
    assert FS.read(tmp_path / "f") == b"012x"


def test_commits_work_on_real_files_and_in_threads(tmp_path: Path) -> None:
    async def commits() -> None:
        base, place = None, tmp_path
        items: list[object] = []
        for sequence in range(20):
            items += [{"n": sequence, "text": "x" * 100_000}]
            place = tmp_path / str(sequence) / "gym" / "agent" / "a"
            writer = ParticipantWriter(
                FS, ThreadOffload(), place, checkpoint_id=f"c{sequence}", kind="agent", instance="a", base=base
            )
            await asyncio.gather(*(writer.add(record(f"r-{n}", items)) for n in range(1)))
            for number in range(1, 15):
                await writer.add(record(f"r-{number}", items[: number + 1]))
            base = (await writer.finish()).base
        reader = ParticipantReader(FS, ThreadOffload(), place, kind="agent", instance="a")
        await reader.open()
        found = {stored.episode: stored.record["session"]["items"] async for stored in reader.records()}
        assert found[EpisodeId("r-0")] == items
        assert found[EpisodeId("r-14")] == items[:15]
        assert not await reader.verify()
        assert len(list(place.iterdir())) <= 20
        assert not [path for path in place.iterdir() if path.name.startswith(".")]

    asyncio.run(commits())


MOUNTS = """\
22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw shared:2 - nfs4 server:/home rw
31 22 0:41 / /scratch\\040space rw - lustre ost rw
32 22 0:42 / /tmp rw - tmpfs tmpfs rw
33 22 0:43 / /cloud rw - fuse.s3fs s3fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "network", "warns"),
    [
        ("/data/run", "ext4", False, None),
        ("/home/me/run", "nfs4", True, "one collector at a time"),
        ("/homely", "ext4", False, None),
        ("/scratch space/run", "lustre", True, "one collector at a time"),
        ("/tmp/run", "tmpfs", False, "lost with the machine"),
        ("/cloud/run", "fuse.s3fs", True, "whether links, locks and fsync hold"),
    ],
)
def test_the_file_system_of_a_directory_is_recognised(path: str, kind: str, network: bool, warns: str | None) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind
    assert is_network(kind) is network
    warning = warning_for(Path(path), MOUNTS)
    assert (warns in warning) if warns and warning else warning is warns


def test_the_machines_own_mounts_can_be_read(tmp_path: Path) -> None:
    assert file_system_of(tmp_path) is not None
    assert warning_for(tmp_path, "") is None
