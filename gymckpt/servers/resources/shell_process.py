"""One live shell: fed a line at a time, killed with everything it started, and never left behind."""

import asyncio
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gymckpt.ports import Offload

MAX_OUTPUT_BYTES = 64 << 10
"""What a line prints beyond this is dropped."""
_CHUNK_BYTES = 16 << 10

_KEEPER = """
exec 3<&2 2>&1
(read -r _ <&3; cd /; rm -rf -- "$1"; kill -9 0) </dev/null >/dev/null 2>&1 &
exec 3<&-
cd -- "$1" || exit 1
ulimit -t 300
ulimit -f 65536
exec /bin/sh
"""
# The standard error it is started with is a pipe whose other end only we hold. When we die, however we die, the watcher
# reads its end, removes the directory, and kills the whole process group.


@dataclass(frozen=True, slots=True)
class Ran:
    """What a line printed (both streams), and its exit status; None if the shell ended or was killed over it."""

    output: str
    status: int | None


class ShellProcess:
    """A `/bin/sh` in a process group and an empty directory of its own. Use `start`; one line at a time."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path, lifeline: int, offload: Offload) -> None:
        self._process = process
        self._directory = directory
        self._lifeline = lifeline
        self._offload = offload
        self._ended = False

    @classmethod
    async def start(cls, offload: Offload) -> "ShellProcess":
        """A new shell; it sees none of our environment."""
        directory = Path(await offload.run(lambda: tempfile.mkdtemp(prefix="gymckpt-shell-")))
        watched, lifeline = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                "/bin/sh",
                "-c",
                _KEEPER,
                "sh",
                str(directory),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=watched,
                env={"PATH": os.defpath, "HOME": str(directory), "LC_ALL": "C"},
                cwd=directory,
                start_new_session=True,
            )
        except BaseException:
            os.close(lifeline)
            shutil.rmtree(directory, ignore_errors=True)
            raise
        finally:
            os.close(watched)
        return cls(process, directory, lifeline, offload)

    @property
    def pid(self) -> int:
        """The shell's process id, which is its group's too."""
        return self._process.pid

    async def run(self, line: str, limit_s: float) -> Ran:
        """Run `line` in the shell; a line that takes longer than `limit_s` ends the shell."""
        stdin, mark = self._process.stdin, secrets.token_hex(16)
        assert stdin is not None
        # Quoted whole: an open quote in it cannot swallow the mark. Without our pipe: it cannot read the mark either.
        text = f"eval {shlex.quote(line)} </dev/null\nprintf '\\n%s %s\\n' {mark} $?\n"
        try:
            async with asyncio.timeout(limit_s):
                stdin.write(text.encode("utf-8", "replace"))
                await stdin.drain()
                return await self._read(mark.encode())
        except (TimeoutError, ConnectionError):
            await self.kill()
            return Ran("", None)

    async def _read(self, mark: bytes) -> Ran:
        stdout = self._process.stdout
        assert stdout is not None
        kept, tail = bytearray(), b""
        while True:
            chunk = await stdout.read(_CHUNK_BYTES)
            kept += chunk[: MAX_OUTPUT_BYTES + len(mark) + 16 - len(kept)]
            tail = (tail + chunk)[-_CHUNK_BYTES:]
            _, found, after = tail.rpartition(mark + b" ")
            if found and after.endswith(b"\n"):
                output = bytes(kept).partition(b"\n" + mark)[0][:MAX_OUTPUT_BYTES]
                return Ran(output.decode("utf-8", "replace"), int(after))
            if not chunk:
                await self.kill()
                return Ran(bytes(kept[:MAX_OUTPUT_BYTES]).decode("utf-8", "replace"), None)

    async def kill(self) -> None:
        """End the shell and all that it started, and remove its directory. Safe to repeat."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        os.close(self._lifeline)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
        await self._offload.run(lambda: shutil.rmtree(self._directory, ignore_errors=True))
