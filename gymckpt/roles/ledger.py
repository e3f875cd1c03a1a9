"""The ledger: the policy model server's durable record of its calls, one row a call, by capture key.

Rows of one rollout stand in the order of appending. Only where they stand is kept in memory, with a bounded cache of
their contents; the rest is in a few files (`ledger_log`), striped by rollout so that a reclaim or a slow fsync holds up
only a part. What a dead execution left is readable, and a restore puts its own rows in its place.
"""

import asyncio
import hashlib
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from gymckpt.errors import CheckpointConflict, StaleAttempt
from gymckpt.identity import EpisodeId
from gymckpt.ports import FileSystem, Offload
from gymckpt.roles.ledger_log import LedgerLog, Place
from gymckpt.roles.ledger_rows import Row

STRIPES = 4
CACHE_BYTES = 64 << 20
FENCES_BEFORE_SWEEP = 4096


class _Places:
    """Where the rows of one attempt stand: 20 bytes a row, and room to grow."""

    __slots__ = ("calls", "files", "lengths", "offsets")

    def __init__(self) -> None:
        self.calls = array("Q")
        self.files = array("I")
        self.offsets = array("I")
        self.lengths = array("I")

    def __len__(self) -> int:
        return len(self.calls)

    def add(self, call: int, place: Place) -> None:
        self.calls.append(call)
        self.files.append(place.file)
        self.offsets.append(place.offset)
        self.lengths.append(place.length)

    def __getitem__(self, position: int) -> Place:
        return Place(self.files[position], self.offsets[position], self.lengths[position])

    def move(self, position: int, place: Place) -> None:
        self.files[position] = place.file
        self.offsets[position] = place.offset
        self.lengths[position] = place.length

    def sort(self, orders: Sequence[int]) -> None:
        """Put the rows in the order of `orders`, one number for each row that stands here now."""
        by_order = sorted(range(len(self)), key=orders.__getitem__)
        self.calls = array("Q", [self.calls[n] for n in by_order])
        self.files = array("I", [self.files[n] for n in by_order])
        self.offsets = array("I", [self.offsets[n] for n in by_order])
        self.lengths = array("I", [self.lengths[n] for n in by_order])

    def find(self, call: int) -> int | None:
        try:
            return self.calls.index(call)
        except ValueError:
            return None


class Ledger:
    """See the module. `is_refused` says whether a fence is still of use; others are dropped in time."""

    def __init__(
        self,
        fs: FileSystem,
        offload: Offload,
        directory: PurePath,
        *,
        stripes: int = STRIPES,
        cache_bytes: int = CACHE_BYTES,
        is_refused: Callable[[EpisodeId], bool] = lambda episode: True,
    ) -> None:
        self._logs = [LedgerLog(fs, offload, directory / f"stripe-{n:02d}", self) for n in range(stripes)]
        self._rows: dict[str, dict[int, _Places]] = {}
        self._fences: dict[str, tuple[int, int]] = {}
        self._sweep_at = FENCES_BEFORE_SWEEP
        self._cache: OrderedDict[EpisodeId, list[Row]] = OrderedDict()
        self._cache_bytes = 0
        self._cache_limit_bytes = cache_bytes
        self._appending: dict[tuple[EpisodeId, str], tuple[Row, asyncio.Future[Place]]] = {}
        self._is_refused = is_refused
        self._opened = False
        self._next_order = 0
        self._orders: dict[tuple[str, int], array[int]] = {}
        """While opening: the number of each row, side by side with its place."""

    def open(self) -> None:
        """Take the directory and read what is there. Blocking; raises `NotAsAsked` if it is held, `DamagedState`."""
        for log in self._logs:
            log.open()
        # A reclaim has moved old rows behind newer ones.
        for (rollout_id, attempt), orders in self._orders.items():
            if places := self._rows.get(rollout_id, {}).get(attempt):
                places.sort(orders)
        self._orders.clear()
        self._opened = True

    async def aclose(self) -> None:
        """Finish what was begun, and let go of the directory."""
        for log in self._logs:
            await log.aclose()

    def count(self, episode: EpisodeId) -> int:
        """How many durable rows the attempt has."""
        places = self._rows.get(episode.rollout_id, {}).get(episode.attempt)
        return len(places) if places is not None else 0

    @property
    def row_count(self) -> int:
        return sum(len(places) for attempts in self._rows.values() for places in attempts.values())

    @property
    def file_count(self) -> int:
        return sum(log.file_count for log in self._logs)

    @property
    def disk_bytes(self) -> int:
        return sum(log.total_bytes for log in self._logs)

    @property
    def cached_bytes(self) -> int:
        return self._cache_bytes

    def is_fenced(self, episode: EpisodeId) -> bool:
        """Whether the attempt was retired here."""
        return episode.attempt <= self._fences.get(episode.rollout_id, (-1, 0))[0]

    async def append(self, episode: EpisodeId, row: Row) -> int:
        """Make `row` durable and give its position back. The same row again changes nothing.

        Raises `StaleAttempt` for a fenced attempt, `CheckpointConflict` if the call has another row, and what the disk
        raises (`NoSpace`, `StorageFailed`).
        """
        key = (episode, str(row["call_id"]))
        if pending := self._appending.get(key):
            return await self._same(episode, row, *pending)
        self._check_fence(episode)
        places = self._rows.get(episode.rollout_id, {}).get(episode.attempt)
        position = places.find(_hash(key[1])) if places is not None else None
        if position is not None:
            return _checked_same(row, (await self.rows(episode))[position], position)
        value = self._row_line(episode, row)
        done = self._log(episode.rollout_id).submit(value, partial(self.recovered, value))
        self._appending[key] = (row, done)
        done.add_done_callback(lambda _: self._appending.pop(key, None))
        await asyncio.shield(done)
        return self._position(episode, key[1])

    async def rows(self, episode: EpisodeId) -> Sequence[Row]:
        """The attempt's rows, in order. The list is the ledger's own: it grows, and is not to be changed."""
        while (cached := self._cache.get(episode)) is None:
            places = self._rows.get(episode.rollout_id, {}).get(episode.attempt)
            if places is None:
                return []
            count = len(places)
            try:
                values = await self._log(episode.rollout_id).read([places[n] for n in range(count)])
            except FileNotFoundError:
                continue
            now = self._rows.get(episode.rollout_id, {}).get(episode.attempt)
            if now is places and len(places) == count and episode not in self._cache:
                self._keep(episode, [value["row"] for value in values], sum(places.lengths))
        self._cache.move_to_end(episode)
        return cached

    async def retire(self, episode: EpisodeId) -> None:
        """Free this attempt and every earlier one, and refuse rows for them from now on. Durable."""
        if self.is_fenced(episode) and not self._attempts_up_to(episode):
            return
        await self._submit(episode.rollout_id, {"op": "retire", "attempt": episode.attempt})
        if len(self._fences) > self._sweep_at:
            self._sweep()

    async def delete(self, episode: EpisodeId) -> None:
        """Free this attempt and every earlier one, without a fence."""
        if self._attempts_up_to(episode):
            await self._submit(episode.rollout_id, {"op": "free", "attempt": episode.attempt})

    async def replace(self, episode: EpisodeId, rows: Sequence[Row]) -> None:
        """Put `rows` in the place of everything the ledger has of this rollout, fences too. Earlier attempts are
        fenced afterwards."""
        await self.clear(episode.rollout_id)
        log = self._log(episode.rollout_id)
        lines = [self._row_line(episode, row) for row in rows]
        if episode.attempt > 0:
            lines.append({"op": "retire", "rollout_id": episode.rollout_id, "attempt": episode.attempt - 1})
        # All wait for the same few fsyncs.
        await asyncio.gather(*(log.submit(line, partial(self.recovered, line)) for line in lines))

    async def clear(self, rollout_id: str) -> None:
        """Free everything the ledger has of the rollout, fences too."""
        if rollout_id in self._rows or rollout_id in self._fences:
            await self._submit(rollout_id, {"op": "clear"})

    # What a log asks of its owner.

    def recovered(self, value: Any, place: Place) -> None:
        """Carry out one line: on opening, and whenever one has become durable."""
        rollout_id = str(value["rollout_id"])
        log = self._log(rollout_id)
        match value["op"]:
            case "row":
                self._put(EpisodeId(rollout_id, int(value["attempt"])), value, place, log)
            case "free":
                self._free(rollout_id, int(value["attempt"]), log)
            case "retire":
                attempt = int(value["attempt"])
                self._free(rollout_id, attempt, log)
                before, length = self._fences.get(rollout_id, (-1, 0))
                if attempt >= before:
                    log.freed(length)
                    log.kept(place.length)
                    self._fences[rollout_id] = (attempt, place.length)
            case "clear":
                self._free(rollout_id, None, log)
                log.freed(self._fences.pop(rollout_id, (-1, 0))[1])

    def is_live(self, value: Any, place: Place) -> bool:
        """Rows that still stand there, and fences that are still of use."""
        rollout_id = str(value["rollout_id"])
        if value["op"] == "retire":
            attempt = int(value["attempt"])
            return self._fences.get(rollout_id, (-1, 0))[0] == attempt and self._keeps_fence(rollout_id, attempt)
        if value["op"] != "row":
            return False
        places = self._rows.get(rollout_id, {}).get(int(value["attempt"]))
        position = places.find(_hash(str(value["row"]["call_id"]))) if places is not None else None
        return places is not None and position is not None and places[position] == place

    def moved(self, value: Any, place: Place) -> None:
        """The row was appended again; a fence has no place."""
        if value["op"] != "row":
            return
        places = self._rows.get(str(value["rollout_id"]), {}).get(int(value["attempt"]))
        position = places.find(_hash(str(value["row"]["call_id"]))) if places is not None else None
        if places is not None and position is not None:
            places.move(position, place)

    def _log(self, rollout_id: str) -> LedgerLog:
        return self._logs[zlib.crc32(rollout_id.encode()) % len(self._logs)]

    async def _submit(self, rollout_id: str, value: dict[str, Any]) -> None:
        whole = {"op": value.pop("op"), "rollout_id": rollout_id, **value}
        await asyncio.shield(self._log(rollout_id).submit(whole, partial(self.recovered, whole)))

    def _row_line(self, episode: EpisodeId, row: Row) -> dict[str, Any]:
        self._next_order += 1
        where = {"rollout_id": episode.rollout_id, "attempt": episode.attempt, "order": self._next_order}
        return {"op": "row", **where, "row": row}

    def _put(self, episode: EpisodeId, value: dict[str, Any], place: Place, log: LedgerLog) -> None:
        if self.is_fenced(episode):
            return
        row: Row = value["row"]
        call = _hash(str(row["call_id"]))
        attempts = self._rows.setdefault(episode.rollout_id, {})
        if (places := attempts.get(episode.attempt)) is None:
            places = attempts[episode.attempt] = _Places()
        log.kept(place.length)
        if (position := places.find(call)) is not None:
            log.freed(places[position].length)
            places.move(position, place)
            return
        places.add(call, place)
        if not self._opened:
            order = int(value["order"])
            self._next_order = max(self._next_order, order)
            self._orders.setdefault((episode.rollout_id, episode.attempt), array("Q")).append(order)
            return
        if (cached := self._cache.get(episode)) is not None:
            cached.append(row)
            self._cache_bytes += place.length
            self._evict()
        elif len(places) == 1:
            self._keep(episode, [row], place.length)

    def _free(self, rollout_id: str, up_to: int | None, log: LedgerLog) -> None:
        attempts = self._rows.get(rollout_id, {})
        for attempt in [attempt for attempt in attempts if up_to is None or attempt <= up_to]:
            places = attempts.pop(attempt)
            self._orders.pop((rollout_id, attempt), None)
            log.freed(sum(places.lengths))
            if self._cache.pop(EpisodeId(rollout_id, attempt), None) is not None:
                self._cache_bytes -= sum(places.lengths)
        if not attempts:
            self._rows.pop(rollout_id, None)

    def _attempts_up_to(self, episode: EpisodeId) -> bool:
        return any(attempt <= episode.attempt for attempt in self._rows.get(episode.rollout_id, ()))

    def _keep(self, episode: EpisodeId, rows: list[Row], size_bytes: int) -> None:
        self._cache[episode] = rows
        self._cache_bytes += size_bytes
        self._evict()

    def _evict(self) -> None:
        while self._cache_bytes > self._cache_limit_bytes and len(self._cache) > 1:
            episode, _ = self._cache.popitem(last=False)
            self._cache_bytes -= sum(self._rows[episode.rollout_id][episode.attempt].lengths)

    def _position(self, episode: EpisodeId, call_id: str) -> int:
        places = self._rows.get(episode.rollout_id, {}).get(episode.attempt)
        position = places.find(_hash(call_id)) if places is not None else None
        if position is None:
            raise StaleAttempt(f"the ledger of episode {episode} was freed meanwhile")
        return position

    async def _same(self, episode: EpisodeId, row: Row, known: Row, done: "asyncio.Future[Place]") -> int:
        _checked_same(row, known, 0)
        await asyncio.shield(done)
        return self._position(episode, str(row["call_id"]))

    def _check_fence(self, episode: EpisodeId) -> None:
        if self.is_fenced(episode):
            raise StaleAttempt(f"the ledger of episode {episode} was retired")

    def _keeps_fence(self, rollout_id: str, attempt: int) -> bool:
        if self._is_refused(EpisodeId(rollout_id, attempt)):
            return True
        self._log(rollout_id).freed(self._fences.pop(rollout_id)[1])
        return False

    def _sweep(self) -> None:
        for rollout_id, (attempt, _) in list(self._fences.items()):
            self._keeps_fence(rollout_id, attempt)
        self._sweep_at = FENCES_BEFORE_SWEEP + 2 * len(self._fences)


def _hash(call_id: str) -> int:
    """Eight bytes that stand for a call id; within one rollout they do not meet by chance."""
    return int.from_bytes(hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _checked_same(row: Row, known: Row, position: int) -> int:
    if row != known:
        raise CheckpointConflict(f"call {row['call_id']!r} has another row in the ledger already")
    return position
