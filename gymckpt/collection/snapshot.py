"""A session as a display shows it."""

import heapq

from gymckpt.collection.progress import Progress, SlowEpisode
from gymckpt.collection.session import Session
from gymckpt.collection.ticking import Ticker

SLOWEST = 5


def snapshot(session: Session, ticker: Ticker) -> Progress:
    """The state of `session` right now. Cheap: proportional to what is in flight."""
    now_s = session.ports.clock.monotonic()
    tally, dispatcher, counts = session.tally, session.dispatcher, session.state.counts
    flights = [flight for flight in dispatcher.flights if flight.sent and not flight.committing]
    rate = tally.rate.per_s(now_s)
    slowest = heapq.nsmallest(SLOWEST, flights, key=lambda flight: flight.begun_s)
    return Progress(
        run_id=session.run_id,
        directory=str(session.opened.paths.root),
        counts=counts,
        in_flight=len(flights),
        parked=len(flights) if dispatcher.closed else 0,
        restored=tally.restored,
        attempts=session.state.attempts,
        finished_here=tally.finished_here,
        elapsed_s=now_s - tally.begun_s,
        rate_per_s=rate,
        eta_s=counts.unresolved / rate if rate else None,
        last_checkpoint=tally.last_checkpoint,
        next_checkpoint_s=ticker.cadence.due_in_s(now_s),
        checkpoint_failures=tally.checkpoint_failures,
        missed_ticks=ticker.cadence.missed,
        free_bytes=tally.free_bytes,
        paused=dispatcher.paused,
        slowest=tuple(SlowEpisode(f.episode, f.owner, now_s - f.begun_s) for f in slowest),
        mean_reward=tally.mean_reward,
    )
