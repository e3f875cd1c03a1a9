"""Whether a closed role is ready, and waiting until it is.

A role's `changed` tells of news since the last call of `report`, whoever made it. So that a look by one caller never
takes the news from another, every look goes through here, and one that finds the role ready wakes all who wait.
"""

import asyncio
import heapq

from gymckpt.participant.role import Role, RoleReport
from gymckpt.participant.waiting import first_of
from gymckpt.ports import Deadline
from gymckpt.wire.control import MAX_REPORTED_BLOCKERS, Report


class Readiness:
    """Looks at one role."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._ready = asyncio.Event()

    def look(self) -> RoleReport:
        """The role's report as of now."""
        report = self._role.report()
        if report.ready:
            self._ready.set()
        else:
            self._ready.clear()
        return report

    async def wait(self, ended: asyncio.Event, deadline: Deadline) -> bool:
        """Return True once a look finds the role ready or `ended` is set, False at the deadline.

        Raises what the role raises.
        """
        while not ended.is_set() and not self.look().ready:
            if not await first_of(deadline, self._role.changed(), self._ready.wait(), ended.wait()):
                return False
        return True


def on_the_wire(report: RoleReport) -> Report:
    """The report as it is sent: the first 100 blockers in alphabetical order, and every restart."""
    return Report(
        ready=report.ready,
        blockers=heapq.nsmallest(MAX_REPORTED_BLOCKERS, report.blockers),
        blocker_count=len(report.blockers),
        counts=dict(report.counts),
        restarts=sorted(report.restarts),
    )
