"""A run being carried out by this process: the host of its dispatcher, its checkpoints and its recoveries."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from gymckpt.collection import events, journals
from gymckpt.collection.attempts import Limits
from gymckpt.collection.candidates import find_candidates
from gymckpt.collection.checkpointing import Checkpointer, CheckpointSettings
from gymckpt.collection.choosing import choose
from gymckpt.collection.dispatch import Dispatcher
from gymckpt.collection.events import Event, Outcome
from gymckpt.collection.feed import unfinished, unfinished_cohorts
from gymckpt.collection.history import History
from gymckpt.collection.opening import Opened, Ports
from gymckpt.collection.progress import OnEvent
from gymckpt.collection.recovery import Candidate
from gymckpt.collection.recovery_procedure import RecoverySettings, recover
from gymckpt.collection.resultfiles import ResultFiles
from gymckpt.collection.retiring import Retirer
from gymckpt.collection.routing import Server
from gymckpt.collection.settings import CollectSettings
from gymckpt.collection.tally import Tally
from gymckpt.collection.watch import Watch
from gymckpt.coordination import Deployment, ParticipantRef, PathMap, describe
from gymckpt.crashpoints import crash_point, declare
from gymckpt.errors import ControlError, NoSpace, ServerError
from gymckpt.identity import EpisodeId, new_checkpoint_id
from gymckpt.ports import Deadline
from gymckpt.storage.journalfiles import Position
from gymckpt.storage.outcomes import Outcome as StoredOutcome

OUTCOME_BEFORE_JOURNAL = declare("collector.outcome.before_journal", "a reply was judged, its outcome is not durable")
OUTCOME_AFTER_JOURNAL = declare("collector.outcome.after_journal", "the outcome is durable, its row is not written")
OUTCOME_BEFORE_ROW = declare("collector.outcome.before_row", "rows are about to be appended to the result files")
OUTCOME_AFTER_ROW = declare("collector.outcome.after_row", "rows are in the result files, nothing says so yet")

FLUSH_EVERY_S = 0.5
SYNC_EVERY_S = 30.0
SYNC_AFTER = 256
WATCH_EVERY_S = 10.0
RECOVERY_TRIES = 5


class Session:
    """Host of dispatcher, checkpointer and recovery over one opened run. `progress` may be read at any time."""

    def __init__(
        self,
        settings: CollectSettings,
        ports: Ports,
        servers: Sequence[Server],
        deployment: Deployment,
        opened: Opened,
        path_map: PathMap,
        on_event: OnEvent,
    ) -> None:
        self.settings = settings
        self.ports = ports
        self.opened = opened
        self.journals = opened.journals
        self.state = opened.run
        self.deployment = deployment
        self.emit = on_event
        self.path_map = path_map
        self._token = settings.token()
        self._lock = opened.lock
        self._candidates: Sequence[Candidate] = opened.candidates
        self.control = asyncio.Lock()
        """Held by whoever talks to the control plane: a checkpoint, a recovery, a batch of retires."""
        self._recovering = asyncio.Event()
        self._restarted = ""
        self.give_up_checkpoint: Callable[[], None] = lambda: None
        """Ends an open checkpoint at once, everything resumed: whoever takes checkpoints sets it."""
        self._full_since_s: float | None = None
        self.last_begun: str | None = None
        """The id begun last, for a checkpoint or a restore."""
        self.finished = asyncio.Event()
        """Set whenever a rollout finished; whoever waits on it clears it."""
        self.files = ResultFiles(ports.fs, ports.offload, opened.paths, opened.lock.check_now)
        self.tally = Tally(ports.clock)
        refs = {server.ref.instance: server.ref for server in servers}
        clock = ports.clock
        limits = Limits(
            concurrency=settings.concurrency,
            max_attempts=settings.max_attempts,
            rollout_timeout_s=settings.rollout_timeout,
            outage_patience_s=settings.server_timeout,
            by_name=settings.agent_concurrency,
        )
        self.dispatcher = Dispatcher(opened.run, refs, ports.data, clock, ports.offload, limits, self)
        timeout_s = settings.control_timeout
        self.retirer = Retirer(
            ports.control, self._token, clock, self.record, self.check_epoch, self.control, timeout_s
        )
        self.watch = Watch(
            refs,
            ports.control,
            self._token,
            clock,
            self.dispatcher.gate,
            control_timeout_s=timeout_s,
            patience_s=settings.server_timeout,
        )
        self.checkpointer = Checkpointer(
            deployment,
            ports.control,
            self._token,
            opened.checkpoints,
            self,
            CheckpointSettings(settings.checkpoint_timeout, settings.commit_timeout, timeout_s, path_map),
            clock,
            fs=ports.fs,
            offload=ports.offload,
        )
        self._deploy(deployment)
        self.journals.on_durable = self._durable
        self.journals.on_full = self._full

    def _deploy(self, deployment: Deployment) -> None:
        self.deployment = deployment
        for part in (self.checkpointer, self.retirer, self.watch):
            part.deployment = deployment

    # The host of checkpoints and recoveries

    @property
    def run_id(self) -> str:
        return self.state.run_id

    @property
    def epoch(self) -> int:
        return self._lock.epoch

    async def begin_checkpoint(self, restore: bool = False) -> str:
        checkpoint_id = new_checkpoint_id(self.state.next_sequence())
        await self.record(events.CheckpointBegun(checkpoint_id, restore))
        self.last_begun = checkpoint_id
        return checkpoint_id

    async def record(self, event: Event) -> None:
        """Return once the event is durable and applied."""
        await self.journals.append(event)

    async def check_epoch(self) -> None:
        await self._lock.check()

    def in_flight(self) -> Mapping[EpisodeId, str]:
        return self.dispatcher.in_flight()

    def restored_unsent(self) -> Mapping[EpisodeId, str]:
        return self.dispatcher.restored_unsent()

    async def wait_reply(self, episode: EpisodeId, deadline: Deadline) -> bool:
        return await self.dispatcher.wait_reply(episode, deadline)

    def journal_positions(self) -> Mapping[str, Position]:
        return self.journals.positions()

    def history(self) -> History:
        return self.state.history()

    # What surrounds the dispatcher

    async def commit(self, outcome: Outcome, *, large: bool) -> None:
        crash_point(OUTCOME_BEFORE_JOURNAL)
        await self.journals.append(outcome, large=large)
        crash_point(OUTCOME_AFTER_JOURNAL)

    async def replied_row(self, rollout_id: str) -> dict[str, Any] | None:
        def last() -> StoredOutcome | None:
            found = None
            for outcome, stored in self.journals.outcomes():
                if outcome.episode.rollout_id == rollout_id and outcome.outcome == "succeeded":
                    found = stored
            return found

        stored = await self.ports.offload.run(last)
        return None if stored is None else await self.journals.row(stored)

    async def retire(self, episode: EpisodeId) -> None:
        await self.retirer.retire(episode)

    async def unreachable(self, instance: str) -> None:
        await self.watch.answering(instance)
        await self.rebooted()

    async def gone(self, instance: str) -> bool:
        return await self.watch.look_at(instance)

    async def rebooted(self) -> bool:
        if self._recovering.is_set() or await self.replaced():
            return True
        self.note_rebooted(await self.watch.rebooted())
        return self._recovering.is_set()

    def note_rebooted(self, participants: tuple[ParticipantRef, ...]) -> None:
        """Servers were started again: what is in flight is void, and a recovery begins."""
        self._note_restarted(describe(participants))

    async def replaced(self) -> bool:
        names = await self.ports.processes.replaced([server.instance for server in self.deployment.plain])
        self._note_restarted(", ".join(names))
        return bool(names)

    def _note_restarted(self, names: str) -> None:
        if names and not self._recovering.is_set():
            self._restarted = names
            self._recovering.set()
            self.give_up_checkpoint()

    # Events as they become durable

    def _durable(self, event: Event, number: int) -> None:
        if not isinstance(event, Outcome):
            self.state.apply(event)
            return
        rollout_id = event.episode.rollout_id
        before = self.state.outcome(rollout_id)
        last = EpisodeId(rollout_id, max(event.episode.attempt, self.state.last_attempt(rollout_id)))
        self.state.apply(event)
        self.files.add(number, event)
        if not event.final or before:
            return
        self.tally.finished(event)
        self.retirer.clear(last)
        self.finished.set()
        self.emit(
            {
                "event": "outcome",
                "rollout_id": rollout_id,
                "attempt": event.episode.attempt,
                "outcome": event.outcome,
                "reward": event.reward,
            }
        )

    def _full(self, full: bool) -> None:
        gate = self.dispatcher.gate
        (gate.close if full else gate.open)("the disk is full")

    # Recovery

    async def set_up(self) -> None:
        """Bring files and servers to where dispatch can begin. May be cancelled anywhere."""
        await self.files.open(self.opened.written, self.journals, self.state.opening)
        self._candidates, notes = await choose(self.opened, self, self.settings, self.ports)
        for note in notes:
            self.emit({"event": "note", "text": note})
        async with self.control:
            await self._recover(start_over=self.settings.start_over)

    async def _recover(self, *, start_over: bool = False) -> None:
        # Starting over is for the beginning of this command: what dies later has this command's own checkpoints.
        recovered = await recover(
            self.deployment,
            self.ports.control,
            self._token,
            self,
            self._candidates,
            RecoverySettings(
                self.settings.restore_timeout,
                self.settings.control_timeout,
                start_over,
                self.path_map,
            ),
            self.ports.clock,
            fs=self.ports.fs,
            offload=self.ports.offload,
        )
        self._deploy(recovered.deployment)
        self.dispatcher.begin_with(recovered.starts)
        for note in recovered.notes:
            self.emit({"event": "note", "text": note})
        restored = sum(1 for start in recovered.starts.values() if not start.source.is_input)
        self.tally.restored += restored
        if recovered.checkpoint_id is not None:
            self.emit(
                {
                    "event": "restored",
                    "checkpoint_id": recovered.checkpoint_id,
                    "episodes": restored,
                    "restarted": len(recovered.starts) - restored,
                }
            )

    async def serve_recoveries(self) -> None:
        """Run the whole procedure whenever servers were started again. Until cancelled; raises what it cannot mend."""
        while True:
            await self._recovering.wait()
            reason = f"started again: {self._restarted}"
            self.emit({"event": "note", "text": f"{reason}; recovering"})
            async with self.control:
                with self.dispatcher.servers_closed("recovering"):
                    void = await self.dispatcher.halt()
                    self.ports.processes.accept()
                    self.retirer.drop()
                    await self.journals.settled()
                    if void:
                        await self.record(events.Voided(void, reason))
                    await self._recover_patiently()
                    self._recovering.clear()

    async def _recover_patiently(self) -> None:
        for attempt in range(1, RECOVERY_TRIES + 1):
            self._candidates, _ = await find_candidates(self.opened.checkpoints, self.run_id)
            try:
                await self._recover()
                return
            except ControlError:
                raise
            except ServerError:
                if attempt == RECOVERY_TRIES:
                    raise
            # Another server went meanwhile: wait until every one answers, then plan anew.
            await self.watch.rebooted()

    async def serve_watch(self) -> None:
        """Look at the servers now and then, so that one that hangs, or was started again, is noticed although nothing
        failed."""
        while True:
            await self._sleep(WATCH_EVERY_S)
            await self.rebooted()
            for server in self.deployment.plain:
                if server.instance in self.opened.record.owners:
                    await self.watch.look_at(server.instance)

    # Result files

    async def serve_files(self) -> None:
        """Append rows as outcomes come; record now and then how far the files went. Until cancelled."""
        synced_s = self.ports.clock.monotonic()
        while True:
            await self._sleep(FLUSH_EVERY_S)
            now_s = self.ports.clock.monotonic()
            due = now_s - synced_s >= SYNC_EVERY_S or self.files.unsynced >= SYNC_AFTER
            due = await self._rows_written(due)
            if due:
                synced_s = now_s
            self.tally.free_bytes = await self.ports.offload.run(
                lambda: self.ports.fs.free_bytes(self.opened.paths.root)
            )

    async def _rows_written(self, due: bool) -> bool:
        """Write rows; on a full disk they wait in memory, and nothing more is dispatched. Raises when patience ends."""
        try:
            await self.write_rows(durable=due)
        except NoSpace:
            now_s = self.ports.clock.monotonic()
            if self._full_since_s is None:
                self._full_since_s = now_s
                self._full(True)
            if now_s - self._full_since_s >= journals.FULL_DISK_PATIENCE_S:
                raise
            return False
        if self._full_since_s is not None:
            self._full_since_s = None
            self._full(False)
        return due

    async def write_rows(self, *, durable: bool) -> None:
        """Append the rows that wait."""
        crash_point(OUTCOME_BEFORE_ROW)
        written = await self.files.flush(durable=durable)
        crash_point(OUTCOME_AFTER_ROW)
        if written is not None:
            await self.record(written)

    # Driving

    async def dispatch(self) -> None:
        """Drive everything that is unfinished to its outcome."""
        feed = unfinished_cohorts if self.opened.record.largest_cohort > 1 else unfinished
        await self.dispatcher.run(feed(self.opened.plan, self.state, self.ports.offload))

    def background(self) -> list[Callable[[], Awaitable[Any]]]:
        """What runs beside the dispatcher until it is done; each raises only what stops the run."""
        return [
            self.retirer.serve,
            self._lock.keep,
            self.serve_recoveries,
            self.serve_watch,
            self.serve_files,
        ]

    async def _sleep(self, seconds: float) -> None:
        await self.ports.clock.sleep_until(self.ports.clock.monotonic() + seconds)
