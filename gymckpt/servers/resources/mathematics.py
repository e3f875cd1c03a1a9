"""`math`: the reward is 1 if the answer is mathematically the expected one, in whatever form (package math-verify)."""

import asyncio
import contextlib
import importlib.util
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import ServerError, UsageError
from gymckpt.servers.deployment import Neighbours
from gymckpt.servers.resources.app import resources_app
from gymckpt.servers.resources.options import read_options
from gymckpt.servers.resources.server import ResourcesServer, Verification
from gymckpt.servers.resources.texts import last_text
from gymckpt.settings import CheckpointSettings, Settings
from gymckpt.wire.control import ResourcesMode, VerifyMode

MAX_SAID = 32 << 10
"""Characters of an answer that are looked at, from its end: that is where the result stands."""
MAX_FOUND = 2000
_MAX_LINE_BYTES = 1 << 20


class MathData(BaseModel):
    """The fields of a task that this server reads."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    expected_answer: str = Field(max_length=MAX_SAID)


class MathOptions(Settings):
    """How many comparisons at once, and how long each may take."""

    workers: int = Field(default=1, ge=1, le=64)
    compare_timeout_s: float = Field(default=30.0, gt=0.0, le=3600.0)
    """An answer that cannot be compared by then is not the expected one."""


class Mathematics(ResourcesServer):
    """No state: a verdict depends on the answer alone."""

    checkpoint_mode: ClassVar[ResourcesMode] = "stateless"
    checkpoint_verify: ClassVar[VerifyMode] = "replay"

    def __init__(self, instance: str, options: MathOptions) -> None:
        super().__init__(instance)
        self._timeout_s = options.compare_timeout_s
        self._idle: asyncio.LifoQueue[Comparer] = asyncio.LifoQueue()
        for _ in range(options.workers):
            self._idle.put_nowait(Comparer())

    async def shutdown(self) -> None:
        """End the processes that compare."""
        while not self._idle.empty():
            await self._idle.get_nowait().stop()

    async def verify(self, verification: Verification) -> dict[str, Any]:
        """`{"reward", "extracted_answer"}`."""
        try:
            data = MathData.model_validate(verification.body)
        except ValidationError as error:
            raise UsageError(f"the task's data: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
        said = last_text(verification.response)[-MAX_SAID:]
        comparer = await self._idle.get()
        try:
            right, found = await comparer.compare(data.expected_answer, said, self._timeout_s)
        finally:
            self._idle.put_nowait(comparer)
        return {"reward": 1.0 if right else 0.0, "extracted_answer": found}


class Comparer:
    """One process that compares, started when it is first needed and again after it was ended."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def compare(self, expected: str, said: str, timeout_s: float) -> tuple[bool, str | None]:
        """Whether it is the same, and what was found in what was said; no after `timeout_s`. Raises `ServerError`."""
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        whole = False
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(jsoncodec.dumps({"expected": expected, "said": said}) + b"\n")
                line = await process.stdout.readline()
            whole = line.endswith(b"\n")
        except TimeoutError:
            return False, None
        except (OSError, ValueError) as error:
            raise ServerError(f"the process that compares mathematics failed: {error}") from error
        finally:
            # After a time-out or a cancel, its next line would be the answer to this question.
            if not whole:
                await self.stop()
        if not whole:
            raise ServerError("the process that compares mathematics ended")
        verdict = jsoncodec.loads(line)
        found = verdict["found"]
        return verdict["right"], found[:MAX_FOUND] if found is not None else None

    async def _start(self) -> Process:
        command = (sys.executable, "-m", "gymckpt.servers.resources.math_worker")
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=_MAX_LINE_BYTES)
        return self._process

    async def stop(self) -> None:
        """End the process, if there is one. Safe to repeat."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def build(instance: str, options: dict[str, Any], checkpoint: CheckpointSettings, neighbours: Neighbours) -> FastAPI:
    """See `servers.registry.Builder`; options are `MathOptions`. Raises `UsageError` without the extra."""
    if importlib.util.find_spec("math_verify") is None:
        raise UsageError(f"{instance}: comparing mathematics needs a package", hint="pip install 'gymckpt[math]'")
    return resources_app(Mathematics(instance, read_options(MathOptions, instance, options)), checkpoint)
