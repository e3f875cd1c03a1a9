"""What a user's own file or directory holds is whole, and on a full disk the verb that frees space still works."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from commands.newfile import new_file
from gymckpt.errors import DamagedState, NotAsAsked
from gymckpt.ports import ThreadOffload
from gymckpt.report.plain import export_checkpoint
from gymckpt.storage.files import LocalFileSystem
from tests.cli.terminal import inline
from tests.mounts import mounted, needs_root


def test_a_new_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with new_file(path) as sink:
        sink.write(b"one\n")
        assert not path.exists()
        sink.write(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_stays_of_a_new_file_that_failed(tmp_path: Path) -> None:
    def fail() -> None:
        with new_file(tmp_path / "results.jsonl") as sink:
            sink.write(b"one\n")
            raise DamagedState("the journal is damaged")

    with pytest.raises(DamagedState):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_new_file_is_never_written_over_one_that_came_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"

    def be_late() -> None:
        with new_file(path) as sink:
            sink.write(b"one\n")
            path.write_bytes(b"theirs")

    with pytest.raises(NotAsAsked):
        be_late()
    assert path.read_bytes() == b"theirs"
    with pytest.raises(NotAsAsked), new_file(path):
        pass
    assert [found.name for found in tmp_path.iterdir()] == ["results.jsonl"]


def test_a_checkpoint_is_exported_whole_or_not_at_all(run: Path, tmp_path: Path) -> None:
    newest = max((run / "checkpoints").iterdir())
    last = max(newest.glob("gym/resources/*/segment-*"))
    data = last.read_bytes()
    last.unlink()
    target = tmp_path / "new"
    with pytest.raises(DamagedState):
        asyncio.run(export_checkpoint(LocalFileSystem(), ThreadOffload(), newest, target))
    assert list(target.iterdir()) == []
    last.write_bytes(data)
    (target / ".gym.0123456789abcdef.tmp").mkdir()  # of one that was killed
    assert asyncio.run(export_checkpoint(LocalFileSystem(), ThreadOffload(), newest, target)) > 0
    assert len(list(target.glob("gym/*/*/manifest.json"))) == 4


def fill(place: Path) -> None:
    (place / "filler").write_bytes(bytes(shutil.disk_usage(place).free))
    assert shutil.disk_usage(place).free == 0


def test_a_full_disk_is_told_by_every_export_and_freed_by_prune(run: Path, tmp_path: Path) -> None:
    needs_root()
    with mounted(Path("tmpfs"), tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m") as place:
        moved = Path(shutil.copytree(run, place / "run"))
        older, newest = sorted(path.name for path in (moved / "checkpoints").iterdir())
        fill(place)
        for arguments in (
            ["--output", str(place / "out.jsonl.zst"), "--format", "jsonl.zst"],
            ["--gym", str(place / "g")],
        ):
            done = inline("export", str(moved), *arguments)
            assert done.returncode == 75, done.stderr
            assert "no space" in done.stderr
            assert "free space" in done.stderr
        assert not (place / "out.jsonl.zst").exists()
        assert not list(place.glob("g/*"))
        done = inline("prune", str(moved))
        assert (done.returncode, done.stdout) == (0, f"removed {older}\n"), done.stderr
        found = json.loads(inline("verify", str(moved), "--json").stdout)
        assert (found["restorable"], found["problems"]) == (newest, [])
        assert [checkpoint["checkpoint_id"] for checkpoint in found["checkpoints"]] == [newest]
