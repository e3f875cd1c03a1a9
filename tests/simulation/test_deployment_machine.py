"""A state machine over a whole deployment: hypothesis chooses what happens next, and shrinks what goes wrong."""

import asyncio

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.simulation.checks import check, check_gates, check_resumed
from tests.simulation.deployment import PARTICIPANTS, SERVERS, Deployment
from tests.simulation.histories import FAULTS, JOBS, PATHS, Kind, Trouble, befall
from tests.simulation.transport import FaultKind

SERVER = st.sampled_from(SERVERS)
AMOUNT = st.sampled_from([0.1, 0.45, 0.6, 0.9])


class Deployed(RuleBasedStateMachine):
    """Servers, collectors and what may befall them; `teardown` lets it all finish and checks every promise."""

    @initialize(
        jobs=st.sampled_from(JOBS),
        seed=st.integers(0, 1000),
        replayed=st.booleans(),
        lasting_ledger=st.booleans(),
        every=st.sampled_from(["2s", "5s", "1ep"]),
        keep=st.sampled_from([1, 50]),
    )
    def begin(self, jobs: tuple, seed: int, replayed: bool, lasting_ledger: bool, every: str, keep: int) -> None:  # type: ignore[type-arg]
        self.replayed = replayed
        self.world = Deployment(
            jobs, seed, replayed=replayed, lasting_ledger=lasting_ledger, checkpoint_every=every, keep=keep
        )
        self.start()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world.run(self.world.finish())
            check(self.world, self.replayed)
        finally:
            self.world.close()

    def befall(self, kind: Kind, amount: float = 0.1, target: str = "agent") -> None:
        self.world.run(befall(self.world, Trouble(kind, 0.0, target, amount=amount)))

    @rule()
    @precondition(lambda self: not self.world.collecting)
    def start(self) -> None:
        async def starting() -> None:
            self.world.collect()
            await asyncio.sleep(0)

        self.world.run(starting())

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.run(asyncio.sleep(seconds))

    @rule()
    @precondition(lambda self: self.world.collecting)
    def a_checkpoint_is_published(self) -> None:
        world, seen = self.world, self.world.life.seen("checkpoint")
        world.life.wishes.checkpoint.set()
        world.run(world.until(lambda: world.life.seen("checkpoint") > seen, 10))

    @rule()
    @precondition(lambda self: self.world.collecting)
    def a_checkpoint_is_asked_for(self) -> None:
        self.world.life.wishes.checkpoint.set()

    @rule()
    @precondition(lambda self: self.world.collecting)
    def collector_is_killed(self) -> None:
        self.world.kill_collector()

    @rule(server=SERVER, amount=AMOUNT)
    def server_is_killed_and_comes_back_empty(self, server: str, amount: float) -> None:
        self.befall("kill_server", amount, server)

    @rule()
    def everything_is_killed(self) -> None:
        self.befall("kill_everything")

    @rule()
    def power_is_cut(self) -> None:
        self.befall("power_cut")

    @rule()
    def leases_expire(self) -> None:
        self.world.run(self.world.until_quiet(self.world.loop.time() + 3800))

    @rule(amount=AMOUNT)
    @precondition(lambda self: self.world.collecting)
    def collector_stands_still(self, amount: float) -> None:
        self.befall("pause_collector", amount)

    @rule(amount=AMOUNT)
    @precondition(lambda self: self.world.collecting)
    def collector_is_robbed_while_it_stands_still(self, amount: float) -> None:
        self.befall("rob_collector", amount)

    @rule(server=SERVER, amount=AMOUNT)
    def server_stands_still(self, server: str, amount: float) -> None:
        self.befall("pause_server", amount, server)

    @rule(server=SERVER, amount=AMOUNT)
    def wall_clock_jumps(self, server: str, amount: float) -> None:
        self.befall("jump_clock", amount, server)

    @rule(server=SERVER, amount=AMOUNT, path=st.sampled_from(PATHS), fault=st.sampled_from(FAULTS))
    def exchanges_go_wrong(self, server: str, amount: float, path: str, fault: FaultKind) -> None:
        self.world.run(befall(self.world, Trouble("fault", 0.0, server, path, fault, amount)))

    @rule(amount=AMOUNT)
    @precondition(lambda self: self.world.collecting)
    def collector_is_asked_to_stop(self, amount: float) -> None:
        self.befall("stop", amount)

    @rule()
    @precondition(lambda self: self.world.collecting)
    def a_second_collector_is_refused(self) -> None:
        self.befall("second_collector")

    @invariant()
    def admission_is_open_exactly_when_idle(self) -> None:
        if hasattr(self, "world"):
            check_gates(self.world)

    @invariant()
    def nothing_is_published_after_its_resume(self) -> None:
        if hasattr(self, "world"):
            check_resumed(self.world)

    @invariant()
    def every_participant_is_there_or_dead(self) -> None:
        if hasattr(self, "world"):
            assert all(name in self.world.servers for name in PARTICIPANTS)


SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
QUICK = settings(max_examples=6, stateful_step_count=6, deadline=None, suppress_health_check=SLOW_IS_FINE)
LONG = settings(QUICK, max_examples=300, stateful_step_count=25)


class LongDeployed(Deployed):
    """The same, longer."""


Deployed.TestCase.settings = QUICK
LongDeployed.TestCase.settings = LONG
test_a_deployment_keeps_every_promise = pytest.mark.timeout(600)(Deployed.TestCase)
test_a_deployment_keeps_every_promise_over_long_histories = pytest.mark.slow(
    pytest.mark.timeout(7200)(LongDeployed.TestCase)
)
