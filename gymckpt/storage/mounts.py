"""Which file system a directory is on: links, locks and fsync are not the same everywhere."""

import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "9p", "afs"}
)
_UNSAFE = {
    "cifs": "hard links and locks depend on the server",
    "smb3": "hard links and locks depend on the server",
    "smbfs": "hard links and locks depend on the server",
    "9p": "fsync may not reach the disk of the host",
    "tmpfs": "everything is lost with the machine",
    "ramfs": "everything is lost with the machine",
    "overlay": "everything may be lost with the container",
}
_ESCAPE = re.compile(r"\\([0-7]{3})")


def file_system_of(path: Path, mounts: str | None = None) -> str | None:
    """The type of the file system that holds `path` (or will: missing parents are skipped); None where unknown."""
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text(errors="surrogateescape")
        except OSError:
            return None
    place = path.resolve()
    found: tuple[int, str] | None = None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        mounted = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        if place.is_relative_to(mounted) and (found is None or len(mounted.parts) >= found[0]):
            found = (len(mounted.parts), after.split(" ")[0])
    return found[1] if found else None


def is_network(kind: str) -> bool:
    """Whether other machines may write there too."""
    return kind in _NETWORK or kind.startswith("fuse.")


def warning_for(path: Path, mounts: str | None = None) -> str | None:
    """What a user should know of keeping a run at `path`; None if it is an ordinary local disk."""
    kind = file_system_of(path, mounts)
    if kind is None:
        return None
    if kind in _UNSAFE:
        return f"{path} is on {kind}: {_UNSAFE[kind]}"
    if kind.startswith("fuse."):
        return f"{path} is on {kind}: whether links, locks and fsync hold depends on it"
    if is_network(kind):
        return f"{path} is on {kind}: locks between machines depend on its settings; one collector at a time"
    return None
