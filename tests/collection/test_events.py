"""Journal events and their JSON."""

from dataclasses import replace

import pytest

from gymckpt import jsoncodec
from gymckpt.collection import events
from gymckpt.errors import DamagedState
from gymckpt.identity import EpisodeId

ONE = EpisodeId("abcd1234-0-0", 2)
EXAMPLES: list[events.Event] = [
    events.EpochBegun(3, "host:7", {"dispatch-2-1": 120}),
    events.Dispatched(ONE, "environment"),
    events.Dispatched(ONE, "environment", events.Source("ckpt-000001-00000000", 1)),
    events.Outcome(ONE, "failed", final=False, kind="server", stage="agent", row={"a": [1]}),
    events.Outcome(ONE, "succeeded", reward=0.5, opening=1, row={"reward": 0.5}),
    events.Replied(ONE, "c1"),
    events.RetirePending((ONE,)),
    events.Retired((ONE, EpisodeId("x")), forgotten=True),
    events.CheckpointBegun("ckpt-000001-00000000", restore=True),
    events.CheckpointPublished("ckpt-000001-00000000", 8, 1, 1000, 0.5, 1.5),
    events.CheckpointFailed("ckpt-000001-00000000", "late"),
    events.CheckpointsRemoved(("ckpt-000001-00000000", "ckpt-000002-00000000")),
    events.CheckpointNamed("ckpt-000001-00000000", "before-lunch", "request-1"),
    events.RequestFailed("request-1", "late"),
    events.RestoreIntended("ckpt-000002-00000000", "ckpt-000001-00000000", (events.Install("r", 0, 3),)),
    events.Restored("ckpt-000002-00000000", "ckpt-000001-00000000"),
    events.RestoreFailed("ckpt-000002-00000000", "damaged"),
    events.Voided((ONE,), "model restarted"),
    events.Reopened("r", 1, 2, "retry"),
    events.IdentityChanged("model", "a", None),
    events.RowsWritten(10, 100, 0),
    events.Finished(0, 4, 1, 1, 1, 1),
]


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.event)
def test_every_event_comes_back_from_its_json_as_it_was(event: events.Event) -> None:
    without_payload = replace(event, row=None) if isinstance(event, events.Outcome) else event
    assert events.from_json(jsoncodec.loads(jsoncodec.dumps(events.to_json(event)))) == without_payload


def test_every_kind_of_event_has_an_example() -> None:
    assert {event.event for event in EXAMPLES} == set(events.EVENTS)


def test_an_event_of_a_later_version_is_passed_over() -> None:
    assert events.from_json({"event": "invented_later"}) is None


@pytest.mark.parametrize("line", [{"event": "dispatched"}, {"event": "retired", "episodes": [["x"]]}])
def test_an_event_with_missing_fields_is_damage(line: dict[str, object]) -> None:
    with pytest.raises(DamagedState):
        events.from_json(line)
