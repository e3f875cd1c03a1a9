"""Takes checkpoints of a running session: when one is due, when somebody asks, and the last one before it stops."""

import asyncio
from collections.abc import Iterable

from gymckpt.collection import events
from gymckpt.collection.cadence import Cadence
from gymckpt.collection.checkpointing import CheckpointNotTaken, CheckpointTaken
from gymckpt.collection.requests import Request, close_request, open_requests
from gymckpt.collection.session import Session
from gymckpt.collection.signals import Wishes
from gymckpt.errors import GymckptError, StoppedResumable
from gymckpt.ports import Deadline

LOOK_EVERY_S = 1.0
"""How often requests are looked for."""


class Ticker:
    """Decides when the session's checkpointer acts, and deals with what comes of it."""

    def __init__(self, session: Session, wishes: Wishes) -> None:
        self._session = session
        self._wishes = wishes
        self._clock = session.ports.clock
        self.cadence = Cadence(session.settings.checkpoint_every, self._clock.monotonic())
        self._taking: asyncio.Task[CheckpointTaken | CheckpointNotTaken] | None = None
        self._warned = False
        session.give_up_checkpoint = self._give_up

    def _give_up(self) -> None:
        if self._taking is not None:
            self._taking.cancel()

    async def serve(self) -> None:
        """Take checkpoints until cancelled. Raises what stops the run: errors of the journal, the lost lock, and
        `StoppedResumable` after too many failures in a row."""
        while True:
            await self._wait()
            if not self._session.checkpointer.all_resumed and self._session.dispatcher.gate.is_open:
                async with self._session.control:
                    await self._session.checkpointer.resume_again()
            requests = await self._requests()
            due = self.cadence.due(self._clock.monotonic(), self._session.tally.finished_here)
            asked = self._wishes.checkpoint.is_set()
            if not (due or asked or requests):
                continue
            if not self._session.dispatcher.gate.is_open:
                # While a server is gone, or a recovery is under way, none could be taken: what is due stays due, and
                # looking again at once would spin.
                await self._clock.sleep_until(self._clock.monotonic() + LOOK_EVERY_S)
                continue
            self._wishes.checkpoint.clear()
            begun_s = self._clock.monotonic()
            if requests or asked or self._session.in_flight() or self._session.restored_unsent():
                await self._tick(requests)
            self.cadence.ticked(begun_s, self._clock.monotonic(), self._session.tally.finished_here)

    async def _wait(self) -> None:
        """Until something may be due: the next moment by time, a finished rollout, a wish, a look at requests."""
        due_s = self.cadence.due_in_s(self._clock.monotonic())
        until_s = self._clock.monotonic() + min(LOOK_EVERY_S, LOOK_EVERY_S if due_s is None else due_s)
        self._session.finished.clear()
        waits = [
            asyncio.ensure_future(self._clock.sleep_until(until_s)),
            asyncio.ensure_future(self._wishes.checkpoint.wait()),
        ]
        if self._session.settings.checkpoint_every.episodes is not None:
            waits.append(asyncio.ensure_future(self._session.finished.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _requests(self) -> list[Request]:
        fs, paths = self._session.ports.fs, self._session.opened.paths
        return await self._session.ports.offload.run(lambda: list(open_requests(fs, paths)))

    async def _tick(self, requests: Iterable[Request]) -> None:
        """One checkpoint for each name that was asked for; unnamed requests share one."""
        unnamed = [request for request in requests if request.name is None]
        named = [request for request in requests if request.name is not None]
        for request in named:
            if (bearer := self._session.state.bearer(request.name or "")) is not None:
                await self._close(request, events.RequestFailed(request.request, f"{request.name} names {bearer}"))
                continue
            result = await self.take(name=request.name)
            await self._answer([request, *unnamed], result)
            unnamed = []
        if unnamed or not named:
            await self._answer(unnamed, await self.take())

    async def _answer(self, requests: Iterable[Request], result: CheckpointTaken | CheckpointNotTaken) -> None:
        for request in requests:
            if isinstance(result, CheckpointTaken):
                answer: events.Event = events.CheckpointNamed(result.checkpoint_id, request.name or "", request.request)
            else:
                answer = events.RequestFailed(request.request, result.reason)
            await self._close(request, answer)

    async def _close(self, request: Request, answer: events.Event) -> None:
        fs, paths = self._session.ports.fs, self._session.opened.paths
        await self._session.record(answer)
        await self._session.ports.offload.run(lambda: close_request(fs, paths, request.request))

    async def take(
        self, *, stop: bool = False, name: str | None = None, deadline: Deadline | None = None
    ) -> CheckpointTaken | CheckpointNotTaken:
        """One checkpoint, and everything that follows from it."""
        session = self._session
        session.last_begun = None
        async with session.control:
            with session.dispatcher.servers_closed("a checkpoint is open"):
                taking = asyncio.create_task(session.checkpointer.take(stop=stop, name=name, deadline=deadline))
                self._taking = taking
                try:
                    await asyncio.wait([taking])
                finally:
                    self._taking = None
                    taking.cancel()
                    await asyncio.wait([taking])
                    if not taking.cancelled():
                        taking.exception()  # looked at: where we are cancelled ourselves, nobody asks for the result
        if taking.cancelled():
            result: CheckpointTaken | CheckpointNotTaken = CheckpointNotTaken(
                session.last_begun, "given up: a server was started again"
            )
        else:
            result = taking.result()
        if isinstance(result, CheckpointTaken):
            await self._taken(result)
        else:
            self._not_taken(result)
        return result

    async def _taken(self, taken: CheckpointTaken) -> None:
        session = self._session
        session.tally.published(taken)
        session.emit(
            {
                "event": "checkpoint",
                "checkpoint_id": taken.checkpoint_id,
                "episodes": taken.episodes,
                "restarts": taken.restarts,
                "bytes": taken.size_bytes,
                "pause_s": round(taken.pause_s, 6),
                "commit_s": round(taken.commit_s, 6),
            }
        )
        for warning in taken.warnings:
            session.emit({"event": "note", "text": warning})
        try:
            await session.check_epoch()
            await session.opened.checkpoints.prune(session.settings.keep, session.run_id, intend=self._removing)
        except OSError as error:
            session.emit({"event": "note", "text": f"old checkpoints could not be removed: {error}"})

    async def _removing(self, checkpoint_ids: list[str]) -> None:
        await self._session.record(events.CheckpointsRemoved(tuple(checkpoint_ids)))

    def _not_taken(self, result: CheckpointNotTaken) -> None:
        session = self._session
        if result.checkpoint_id is None and not session.deployment.participants:
            if not self._warned:
                session.emit({"event": "note", "text": f"no checkpoints: {result.reason}"})
            self._warned = True
            return
        if result.checkpoint_id is not None:
            event = {"event": "checkpoint_failed", "checkpoint_id": result.checkpoint_id, "reason": result.reason}
            session.emit(event)
        else:
            session.emit({"event": "note", "text": f"no checkpoint: {result.reason}"})
        session.note_rebooted(result.rebooted)
        if result.retire is not None:
            session.dispatcher.abandon(result.retire, "it alone kept checkpoints from being taken")
        session.tally.checkpoint_failures += 1
        limit = session.settings.max_checkpoint_failures
        if limit is not None and session.tally.checkpoint_failures >= limit:
            raise StoppedResumable(
                f"{session.tally.checkpoint_failures} checkpoints in a row failed: {result.reason}",
                hint="the last published checkpoint stands; resume when the cause is mended",
            )

    async def last(
        self, serving: "asyncio.Task[None]", deadline: Deadline
    ) -> CheckpointTaken | CheckpointNotTaken | None:
        """The checkpoint before the run stops. One that is open already is joined if it ends in time, else aborted and
        taken anew; a missed prepare has its blockers retired, once. None if there was nothing to take."""
        if self._taking is not None:
            half = Deadline(deadline.clock, deadline.clock.monotonic() + deadline.remaining_s / 2)
            try:
                async with asyncio.timeout(half.remaining_s):
                    return await asyncio.shield(self._taking)
            except TimeoutError:
                pass
        serving.cancel()
        await asyncio.wait([serving])
        if not self._session.in_flight() and not self._session.restored_unsent():
            self._session.emit({"event": "note", "text": "no last checkpoint: nothing was in flight"})
            return None
        result = await self.take(stop=True, deadline=deadline)
        if isinstance(result, CheckpointNotTaken) and result.blockers and not deadline.passed:
            await self._retire_blockers(result, deadline)
            result = await self.take(stop=True, deadline=deadline)
        return result

    async def _retire_blockers(self, missed: CheckpointNotTaken, deadline: Deadline) -> None:
        session = self._session
        in_flight = {episode.capture_key: episode for episode in session.in_flight()}
        blockers = [in_flight[key] for key in missed.blockers if key in in_flight]
        for episode in blockers:
            session.dispatcher.abandon(episode, "it kept the last checkpoint from being taken")
        try:
            async with asyncio.timeout(deadline.remaining_s):
                await asyncio.gather(*(session.retirer.retire(episode) for episode in blockers))
        except (TimeoutError, GymckptError):
            return  # the second try tells whether it was enough
