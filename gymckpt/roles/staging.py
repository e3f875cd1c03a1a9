"""Staged prefixes on an inference worker: kept durably by staging key, and believed again only after every check.

For any engine: `StagingStore` keeps what a generation cut staged; `refusal` says why a prefix that comes back must not
be continued. Every refusal has a code of its own, and means one thing: generate the whole answer.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from pydantic import ValidationError

from gymckpt.errors import DamagedState, GymckptError
from gymckpt.ports import Clock, FileSystem, Offload
from gymckpt.roles.ledger_log import decode, encode
from gymckpt.storage.durable import make_directories, remove_quietly, write_new
from gymckpt.wire.cuts import PrefixClaim, prefix_digest

KEPT_INVENTORIES = 2
KEPT_S = 86_400.0
"""How long a staged prefix outlives its cut at most."""

RefusalCode = Literal[
    "staging_keys",
    "source_call",
    "request_digest",
    "parent_tokens",
    "policy_version",
    "token_count",
    "log_probs",
    "prefix_digest",
    "lineage",
    "staged_otherwise",
    "output_budget",
    "engine",
]

_FILE = re.compile(r"^cut-([0-9]{9})-[0-9a-f]{16}\.jsonl\Z")


class PrefixRefused(GymckptError):
    """A prefix cannot be continued; the caller makes the whole call instead. `reason` says which check failed."""

    code = "prefix_refused"
    http_status = 409

    def __init__(self, reason: RefusalCode, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Replacement:
    """The call that is to continue a prefix, as it was admitted here."""

    rollout_id: str
    attempt: int
    request_digest: str
    prompt_digest: str
    """Over the exact token ids of its prompt: the parent tokens of the prefix."""
    policy_version: str
    output_limit: int


def refusal(claim: PrefixClaim, staged: PrefixClaim | None, replacement: Replacement) -> PrefixRefused | None:
    """Why `claim` must not be continued by `replacement`, or None. `staged` is what this worker itself keeps under the
    claim's last staging key, if it still does: then the claim must say the same."""
    source = claim.source
    if len(set(claim.staging_keys)) != len(claim.staging_keys):
        return PrefixRefused("staging_keys", "a staging key is given twice")
    if source.rollout_id != replacement.rollout_id or source.attempt >= replacement.attempt:
        call = f"{source.rollout_id} attempt {source.attempt}"
        return PrefixRefused("source_call", f"{call} cannot have begun what this episode continues")
    if claim.request_digest != replacement.request_digest:
        return PrefixRefused("request_digest", "the request is another than the one that was cut")
    if claim.prompt_digest != replacement.prompt_digest:
        return PrefixRefused("parent_tokens", "the prompt's tokens are others than those the prefix follows")
    if claim.policy_version != replacement.policy_version:
        versions = f"{claim.policy_version[:80]!r}, this worker serves {replacement.policy_version[:80]!r}"
        return PrefixRefused("policy_version", f"the prefix was made by {versions}")
    if claim.prefix_token_count != len(claim.token_ids):
        return PrefixRefused(
            "token_count", f"{claim.prefix_token_count} tokens announced, {len(claim.token_ids)} given"
        )
    if len(claim.log_probs) != len(claim.token_ids):
        return PrefixRefused("log_probs", f"{len(claim.log_probs)} for {len(claim.token_ids)} tokens")
    if claim.prefix_digest != prefix_digest(claim.token_ids, claim.log_probs):
        return PrefixRefused("prefix_digest", "the tokens do not have the digest announced")
    if set(claim.lineage) & set(claim.staging_keys) or len(set(claim.lineage)) != len(claim.lineage):
        return PrefixRefused("lineage", "the prefix descends from itself")
    if staged is not None and (problem := _difference(claim, staged)):
        return PrefixRefused("staged_otherwise", f"this worker staged it with another {problem}")
    if claim.effective_output_limit != replacement.output_limit:
        limits = f"{claim.effective_output_limit} when it was cut, {replacement.output_limit} now"
        return PrefixRefused("output_budget", f"the answer may have {limits} tokens")
    if claim.finish_reason is None and claim.prefix_token_count >= replacement.output_limit:
        return PrefixRefused("output_budget", "the prefix leaves no token to generate")
    return None


def _difference(claim: PrefixClaim, staged: PrefixClaim) -> str | None:
    for name in PrefixClaim.model_fields:
        if getattr(claim, name) != getattr(staged, name):
            return name
    return None


@dataclass(frozen=True, slots=True)
class _Staged:
    path: PurePath
    offset: int
    length: int


class StagingStore:
    """Prefixes by staging key, one durable file a cut. Those of the last two cuts stay, and none longer than a day.

    What a checkpoint needs is in the checkpoint; this is what lets a worker recognise a prefix as its own.
    """

    def __init__(self, fs: FileSystem, offload: Offload, directory: PurePath, clock: Clock) -> None:
        self._fs = fs
        self._offload = offload
        self._directory = directory
        self._clock = clock
        self._keys: dict[str, _Staged] = {}
        self._files: dict[int, tuple[PurePath, float]] = {}
        self._writing = asyncio.Lock()

    @property
    def file_count(self) -> int:
        return len(self._files)

    def open(self) -> None:
        """Find what earlier processes staged. Blocking; a file that cannot be read whole is removed."""
        make_directories(self._fs, self._directory)
        for entry in self._fs.scan(self._directory):
            path = self._directory / entry.name
            match = _FILE.match(entry.name)
            if match is None or self._clock.time() - entry.modified_s > KEPT_S:
                if match is not None:
                    remove_quietly(self._fs, path)
                continue
            try:
                self._index(path, self._fs.read(path))
            except (ValueError, ValidationError, OSError):
                remove_quietly(self._fs, path)
                continue
            self._files[int(match.group(1))] = (path, entry.modified_s)
        self._free()

    async def stage(self, cut_id: str, claims: Sequence[PrefixClaim]) -> None:
        """Make the prefixes of one cut durable. `cut_id` is 16 hex digits. Raises what the disk raises."""
        async with self._writing:
            number = max(self._files, default=0) + 1
            path = self._directory / f"cut-{number:09d}-{cut_id}.jsonl"
            data = await self._offload.run(lambda: self._write(path, claims))
            self._index(path, data)
            self._files[number] = (path, self._clock.time())
            await self._offload.run(self._free)

    async def get(self, staging_key: str) -> PrefixClaim | None:
        """The prefix under that key, or None if it was never staged here or is freed."""
        staged = self._keys.get(staging_key)
        if staged is None:
            return None
        try:
            return await self._offload.run(lambda: self._read(staged))
        except FileNotFoundError:
            return None

    def _write(self, path: PurePath, claims: Sequence[PrefixClaim]) -> bytes:
        data = b"".join(encode(claim.model_dump()) for claim in claims)
        write_new(self._fs, path, data)
        return data

    def _read(self, staged: _Staged) -> PrefixClaim:
        line = self._fs.read(staged.path, staged.offset, staged.length)
        try:
            return PrefixClaim.model_validate(decode(line.removesuffix(b"\n")))
        except ValueError as error:
            raise DamagedState(f"{staged.path} at byte {staged.offset}: {error}") from error

    def _index(self, path: PurePath, data: bytes) -> None:
        offset = 0
        for line in data.split(b"\n")[:-1]:
            key = decode(line)["staging_keys"][-1]
            self._keys[str(key)] = _Staged(path, offset, len(line) + 1)
            offset += len(line) + 1
        if offset != len(data):
            raise ValueError("the file ends inside a line")

    def _free(self) -> None:
        kept = sorted(self._files)[-KEPT_INVENTORIES:]
        now_s = self._clock.time()
        for number in [n for n, (_, at) in self._files.items() if n not in kept or now_s - at > KEPT_S]:
            path, _ = self._files.pop(number)
            for key in [key for key, staged in self._keys.items() if staged.path == path]:
                del self._keys[key]
            remove_quietly(self._fs, path)
