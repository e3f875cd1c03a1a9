"""The three journals of a run as one: each event goes to its own, and replay drives the run's state."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from gymckpt.collection import events
from gymckpt.collection.events import Event, JournalName
from gymckpt.collection.run import Run
from gymckpt.errors import DamagedState, NoSpace
from gymckpt.ports import Clock, FileSystem, Offload
from gymckpt.storage.journal import Journal
from gymckpt.storage.journalfiles import Position
from gymckpt.storage.outcomes import Outcome as StoredOutcome
from gymckpt.storage.outcomes import OutcomesJournal

FULL_DISK_PATIENCE_S = 60.0
FULL_DISK_AGAIN_S = 2.0


class Journals:
    """`dispatch`, `outcomes` and `events` of one run, for the holder of `epoch`.

    For reading: `inspect`, then `replay`. For writing: `open`, `replay`, then `append`.
    """

    def __init__(self, fs: FileSystem, offload: Offload, clock: Clock, directory: PurePath, *, epoch: int = 1) -> None:
        self.on_durable: Callable[[Event, int], None] = lambda event, number: None
        """Called on the event loop with each event that became durable, and its number."""
        self.on_full: Callable[[bool], None] = lambda full: None
        """Called when the disk is found full, and when there is space again."""
        self._clock = clock
        self._directory = directory
        self._dispatch = Journal(fs, offload, directory, "dispatch", epoch=epoch)
        self._events = Journal(fs, offload, directory, "events", epoch=epoch)
        self._outcomes = OutcomesJournal(fs, offload, directory, "outcomes", epoch=epoch)
        self._appending: set[asyncio.Task[int]] = set()

    @property
    def _all(self) -> dict[JournalName, Journal]:
        return {"events": self._events, "outcomes": self._outcomes, "dispatch": self._dispatch}

    async def inspect(self, at_least: Mapping[str, Position] | None = None) -> None:
        """Read and check what is there, and that it reaches `at_least`, changing nothing. Raises `DamagedState` naming
        file and line."""
        for name, journal in self._all.items():
            await journal.inspect()
            position = (at_least or {}).get(name)
            if position is not None and not journal.holds(position):
                raise DamagedState(
                    f"{self._directory / position.file}: the {name} journal ends at {journal.position}, "
                    f"a published checkpoint knows it to {position}",
                    hint="restore the journal from a copy; nothing was changed",
                )

    async def open(self, at_least: Mapping[str, Position] | None = None) -> None:
        """Begin this epoch. `at_least`: the positions that a published checkpoint knows of. Raises `DamagedState`
        before anything is touched, `NotAsAsked` if this epoch has begun already."""
        await self.inspect(at_least)
        for journal in self._all.values():
            await journal.open(inspected=True)

    def positions(self) -> dict[str, Position]:
        """The durable end of each journal."""
        return {name: journal.position for name, journal in self._all.items()}

    async def append(self, event: Event, *, large: bool = False, patient: bool = True) -> int:
        """Return the event's number in its journal once it is durable and `on_durable` has taken it into account, in
        the order of the journal. A caller that is cancelled does not call it back: `settled` waits for such events.

        `large`: its row is worth a thread of its own. On a full disk it waits and tries again, and raises `NoSpace`
        when patience ends; at once if not `patient`.
        """
        if not patient:
            return await self._write(event, large)
        if not large:
            try:
                return await self._write(event, large)
            except NoSpace:
                pass
        task = asyncio.create_task(self._insist(event, large))
        self._appending.add(task)
        task.add_done_callback(self._appended)
        return await asyncio.shield(task)

    async def _insist(self, event: Event, large: bool) -> int:
        begun_s: float | None = None
        while True:
            try:
                number = await self._write(event, large)
            except NoSpace:
                now_s = self._clock.monotonic()
                if begun_s is None:
                    begun_s = now_s
                    self.on_full(True)
                if now_s - begun_s >= FULL_DISK_PATIENCE_S:
                    raise
                await self._clock.sleep_until(now_s + FULL_DISK_AGAIN_S)
                continue
            if begun_s is not None:
                self.on_full(False)
            return number

    def _write(self, event: Event, large: bool) -> Coroutine[Any, Any, int]:
        def then(number: int) -> None:
            self.on_durable(event, number)

        if isinstance(event, events.Outcome):
            return self._outcomes.append(events.to_json(event), event.row, then=then, large=large)
        journal = self._dispatch if event.journal == "dispatch" else self._events
        return journal.append(events.to_json(event), then=then)

    def _appended(self, task: "asyncio.Task[int]") -> None:
        self._appending.discard(task)
        if not task.cancelled():
            task.exception()

    async def settled(self) -> None:
        """Return once nothing that was to be appended is under way."""
        while self._appending:
            await asyncio.wait([*self._appending])
        for journal in self._all.values():
            await journal.settled()

    async def close(self) -> None:
        """Let go of the files, after what is under way."""
        await self.settled()
        for journal in self._all.values():
            await journal.close()

    # Blocking

    def replay_events(self) -> Iterator[Event]:
        """Every event of the events journal that this version knows. Blocking."""
        return _known(self._events.replay())

    def replay_dispatches(self) -> Iterator[Event]:
        """Every dispatch. Blocking."""
        return _known(self._dispatch.replay())

    def outcomes(self) -> Iterator[tuple[events.Outcome, StoredOutcome]]:
        """Every outcome without its row, and where the row is. Blocking; reads the index, not the rows."""
        for stored in self._outcomes.outcomes():
            event = events.from_json(stored.event)
            if isinstance(event, events.Outcome):
                yield event, stored

    def replay_into(self, run: Run) -> events.RowsWritten:
        """Drive `run` to where the journals stand; gives how far the result files were written. Blocking.

        Raises `DamagedState` where outcomes are missing that were known to be durable.
        """
        written = events.RowsWritten(0, 0, 0)
        for event in self.replay_events():
            run.apply(event)
            if isinstance(event, events.RowsWritten):
                written = event
        if written.outcomes > self._outcomes.position.sequence:
            raise DamagedState(
                f"{self._directory}: the outcomes journal ends at {self._outcomes.position}, and the result files had "
                f"the first {written.outcomes} outcomes",
                hint="restore the journal from a copy; nothing was changed",
            )
        for outcome, _ in self.outcomes():
            run.apply(outcome)
        for event in self.replay_dispatches():
            run.apply(event)
        return written

    async def row(self, stored: StoredOutcome) -> dict[str, Any] | None:
        """The row of an outcome."""
        return (await self.rows([stored]))[0]

    async def rows(self, stored: Sequence[StoredOutcome]) -> list[dict[str, Any] | None]:
        """The rows of outcomes that follow one another: what they share on disk is read once."""
        payloads = await self._outcomes.payloads(stored)
        for outcome, payload in zip(stored, payloads, strict=True):
            if payload is not None and not isinstance(payload, dict):
                raise DamagedState(f"outcome {outcome.sequence} holds a row that is no object")
        return payloads

    async def verify(self) -> None:
        """Read and check every row too. Raises `DamagedState` at the first that is not as it was written."""
        await self._outcomes.verify()


def _known(lines: Iterator[dict[str, Any]]) -> Iterator[Event]:
    for line in lines:
        event = events.from_json(line)
        if event is not None:
            yield event
