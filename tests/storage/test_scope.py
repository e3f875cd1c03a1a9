"""A checkpoint whose parts are whole, each in itself, and that lacks what it says it continues."""

import pytest
from msgspec.structs import replace

from gymckpt.identity import EpisodeId
from gymckpt.storage.records import ExportedRecord
from gymckpt.storage.salvage import salvage
from tests.storage.building import INLINE, checkpoint_id, collection, directory, memory, opaque, publish, run, store

ONE, TWO = EpisodeId("one"), EpisodeId("two")


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (opaque("other", 2), "no environment and no agent has a boundary of"),
        (replace(opaque("two", 2), boundary=None), "no environment and no agent has a boundary of"),
        (replace(opaque("two", 2), needs=(("resources", "shop"),)), "the part of resources shop does not hold"),
        (replace(opaque("two", 2), needs=(("agent", "a"), ("model", "m"))), "the part of model m does not hold"),
    ],
    ids=["absent", "without boundary", "needed absent", "needed by itself"],
)
def test_an_episode_that_a_part_lacks_is_named_and_the_others_are_salvaged(second: ExportedRecord, told: str) -> None:
    fs = memory()

    async def story() -> None:
        checkpoints = directory(fs)
        await checkpoints.begin(checkpoint_id(1))
        await store(fs, 1, [opaque("one", 1), second])
        made = await checkpoints.publish(checkpoint_id(1), collection(1, [ONE, TWO]))
        for quick in (True, False):
            (problem,) = await checkpoints.verify(made, quick=quick)
            assert told in problem.what
            assert problem.episodes == (TWO,)
        saved = await salvage(fs, INLINE, checkpoints, made, checkpoint_id(2), sequence=2, epoch=1, created_at=5.0)
        assert saved.checkpoint.collection.continued == [ONE]
        assert not await checkpoints.verify(saved.checkpoint)

    run(story())


def test_what_needs_only_those_who_hold_it_is_whole() -> None:
    fs = memory()
    made, _ = run(publish(fs, 1, [opaque("one", 1), replace(opaque("two", 2), needs=(("agent", "a"),))]))
    assert run(directory(fs).verify(made)) == []
