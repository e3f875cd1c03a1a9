"""Directories that a controller may name: absolute, without `..`, below the root when one is set, no symlink between.

A caller with the token is trusted with checkpoints, not with the machine: what it names is checked before use.
"""

import ipaddress
from pathlib import Path, PurePosixPath

from gymckpt.errors import InvalidCheckpointState, UsageError
from gymckpt.identity import Kind
from gymckpt.ports import FileSystem
from gymckpt.settings import CheckpointSettings


def require_root(settings: CheckpointSettings, host: str) -> None:
    """Raise `UsageError` if a participant would listen on `host`, beyond loopback, without a `checkpoint.root`."""
    if settings.enabled and settings.root is None and not is_loopback(host):
        raise UsageError(
            f"checkpoint.root is required when the server listens on {host[:80]!r}, beyond loopback",
            hint="name the directory that holds all run directories, or listen on 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def part_directory(fs: FileSystem, text: str, root: Path | None, kind: Kind, instance: str) -> Path:
    """Where this participant's part of the checkpoint in directory `text` lies: `<text>/gym/<kind>/<instance>`.

    Blocking. Raises `InvalidCheckpointState`, also if anything that exists on the way is no directory.
    """
    directory = checked_path(text, root) / "gym" / kind / instance
    refuse_symlinks(fs, directory, root)
    return directory


def checked_path(text: str, root: Path | None) -> Path:
    """`text` as a path; raises `InvalidCheckpointState` unless it is absolute, has no `..` and lies below `root`."""
    path = PurePosixPath(text)
    if not path.is_absolute() or ".." in path.parts or "\0" in text:
        raise InvalidCheckpointState(f"path {text[:300]!r} is not absolute, or has `..` in it")
    if root is not None and (root not in Path(path).parents):
        raise InvalidCheckpointState(
            f"path {text[:300]!r} is not below this server's checkpoint.root {str(root)!r}",
            hint="use a run directory below it, or set checkpoint.root",
        )
    return Path(path)


def refuse_symlinks(fs: FileSystem, path: Path, root: Path | None) -> None:
    """Raise `InvalidCheckpointState` if a part of `path` below `root` exists and is no directory. Blocking.

    Without a root only the last four parts are looked at: ours, and the checkpoint's own directory.
    """
    parts = [*reversed(path.parents), path]
    below = [part for part in parts if root in part.parents] if root is not None else parts[-4:]
    for part in below:
        try:
            kind = fs.stat(part).kind
        except FileNotFoundError:
            return
        except OSError as error:
            raise InvalidCheckpointState(f"{part}: {error.strerror}") from error
        if kind != "directory":
            raise InvalidCheckpointState(f"{part} is no directory (symlinks are not followed)")
