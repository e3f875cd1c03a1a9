"""File systems of a test's own, where root allows; elsewhere the test is skipped with the reason."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(argument) for argument in arguments], capture_output=True, text=True, check=False)


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")


@contextmanager
def mounted(image: Path, place: Path, *options: str) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    done = command("mount", *options, image, place)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        if command("umount", place).returncode:
            command("umount", "--lazy", place)
