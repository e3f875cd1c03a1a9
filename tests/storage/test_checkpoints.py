"""Publishing is all or nothing; what is newest, what is kept, and what is never touched."""

import hashlib
import random
from pathlib import PurePath
from typing import Any

import pytest
from msgspec.structs import replace

from gymckpt.collection.candidates import find_candidates
from gymckpt.errors import CheckpointFailed, DamagedState, GymckptError, NotAsAsked, StorageUnavailable
from gymckpt.identity import EpisodeId
from gymckpt.storage.checkpoints import CheckpointDirectory, Collection, Restarted
from gymckpt.storage.durable import write_new
from gymckpt.storage.journalfiles import Position
from gymckpt.storage.manifest import MANIFEST
from gymckpt.storage.published import CHECKPOINT, LATEST
from gymckpt.storage.reader import ParticipantReader
from gymckpt.storage.salvage import salvage
from gymckpt.storage.sealing import seal, unseal
from tests.simulation.files import MemoryFileSystem
from tests.storage.building import (
    INLINE,
    ROOT,
    RUN,
    RUN_ID,
    checkpoint_id,
    collection,
    directory,
    load,
    memory,
    opaque,
    part,
    publish,
    run,
    store,
)


def damage(fs: MemoryFileSystem, sequence: int, name: str = "segment", at: float = 0.5) -> None:
    path = next(part(sequence) / entry.name for entry in fs.scan(part(sequence)) if entry.name.startswith(name))
    data = bytearray(fs.read(path))
    data[int(len(data) * at)] ^= 1
    fs.overwrite(path, bytes(data))


def ids(*sequences: int) -> list[str]:
    return [checkpoint_id(sequence) for sequence in sequences]


def listed(fs: MemoryFileSystem) -> list[tuple[str, str]]:
    return [(entry.checkpoint_id, entry.state) for entry in run(directory(fs).listing())]


def test_what_is_published_is_found_with_all_that_the_controller_recorded() -> None:
    fs = memory()
    more: dict[str, Any] = {
        "restarted": [Restarted(EpisodeId("x", 2), "no_boundary")],
        "journals": {"dispatch": Position("dispatch-000001-0001.jsonl", 120, 3)},
        "name": "before-the-move",
    }
    published, _ = run(publish(fs, 1, [opaque("o", 1)], **more))
    found, problems = run(directory(fs).newest_valid(RUN_ID))
    assert (found, problems) == (published, [])
    assert found is not None
    assert found.collection == collection(1, [EpisodeId("o")], **more)
    assert found.participants == (("agent", "a"),)
    assert run(directory(fs).latest()) == checkpoint_id(1)
    assert run(directory(fs).open(checkpoint_id(1))) == published


def test_the_newest_is_by_epoch_and_sequence_whatever_latest_says() -> None:
    fs = memory()

    async def both() -> None:
        checkpoints = directory(fs)
        for sequence, epoch in ((5, 1), (3, 2)):
            await checkpoints.begin(checkpoint_id(sequence))
            await store(fs, sequence, [opaque("o", sequence)])
            await checkpoints.publish(
                checkpoint_id(sequence), Collection(checkpoint_id(sequence), RUN_ID, sequence, epoch, 1.0)
            )
        fs.overwrite(RUN / LATEST, checkpoint_id(5).encode())
        found, _ = await checkpoints.newest_valid(RUN_ID)
        assert found is not None
        assert found.collection.sequence == 3

    run(both())


def test_a_checkpoint_of_another_run_is_never_taken() -> None:
    fs = memory()
    run(publish(fs, 1, [opaque("o", 1)]))
    assert run(directory(fs).newest_valid("f" * 32)) == (None, [])


def test_a_torn_old_checkpoint_does_not_stand_in_the_way_of_a_newer_good_one() -> None:
    fs = memory()
    for sequence in (1, 2):
        run(publish(fs, sequence, [opaque("o", sequence)]))
    fs.overwrite(ROOT / checkpoint_id(1) / CHECKPOINT, b"{}")
    found, problems = run(directory(fs).newest_valid(RUN_ID))
    assert found is not None
    assert found.collection.sequence == 2
    assert [checkpoint_id(1) in problem.what for problem in problems] == [True]


def test_a_damaged_newest_is_named_and_skipped() -> None:
    fs = memory()
    for sequence in (1, 2):
        run(publish(fs, sequence, [opaque("o", sequence)]))
    damage(fs, 2)
    found, problems = run(directory(fs).newest_valid(RUN_ID))
    assert found is not None
    assert found.collection.sequence == 1
    assert len(problems) == 1
    assert "segment-" in str(problems[0])


def test_a_read_that_fails_now_is_not_damage() -> None:
    fs = memory()
    run(publish(fs, 1, [opaque("o", 1)]))

    def before(operation: str, path: object) -> None:
        if operation == "read":
            raise OSError(5, "I/O error")

    fs.before = before
    with pytest.raises(StorageUnavailable):
        run(directory(fs).newest_valid(RUN_ID))


@pytest.mark.parametrize("name", [CHECKPOINT, "segment", "manifest"])
def test_one_checkpoint_that_cannot_be_read_now_hides_no_other_and_is_never_passed_over(name: str) -> None:
    fs = memory()
    older, _ = run(publish(fs, 1, [opaque("o", 1)]))
    newest, _ = run(publish(fs, 2, [opaque("o", 2)]))

    def before(operation: str, path: PurePath) -> None:
        if operation == "read" and checkpoint_id(2) in path.parts and path.name.startswith(name):
            raise PermissionError(13, "Permission denied")

    fs.before = before
    checkpoints = directory(fs)
    assert run(checkpoints.verify(older)) == []
    if name == CHECKPOINT:
        assert [state for _, state in listed(fs)] == ["unreadable", "published"]
    else:
        (problem,) = run(checkpoints.verify(newest))
        assert problem.unreadable
        assert name in problem.what
    with pytest.raises(StorageUnavailable, match=name) as refused:
        run(find_candidates(checkpoints, RUN_ID))
    assert checkpoint_id(1) in str(refused.value.hint)
    fs.before = lambda operation, path: None
    found, problems = run(find_candidates(checkpoints, RUN_ID))
    assert ([one.checkpoint_id for one in found], problems) == (ids(2, 1), [])


def test_a_checkpoint_copied_under_another_name_does_not_count() -> None:
    fs = memory()
    run(publish(fs, 1, [opaque("o", 1)]))
    fs.make_root(part(2))
    for path, data in fs.tree().items():
        if checkpoint_id(1) in path:
            fs.create((ROOT / checkpoint_id(2)).joinpath(*path.split("/")[4:])).write(data)
    assert listed(fs) == [(checkpoint_id(2), "damaged"), (checkpoint_id(1), "published")]


def test_nothing_is_published_unless_every_commit_that_succeeded_is_there() -> None:
    fs = memory()

    async def attempts() -> None:
        checkpoints = directory(fs)
        await checkpoints.begin(checkpoint_id(1))
        await store(fs, 1, [opaque("o", 1)])
        for expected in ([], [("model", "m")], [("agent", "a"), ("model", "m")]):
            with pytest.raises(CheckpointFailed, match="manifests of"):
                await checkpoints.publish(checkpoint_id(1), collection(1), expected=expected)  # type: ignore[arg-type]
        with pytest.raises(CheckpointFailed):
            await checkpoints.publish(checkpoint_id(1), collection(2))
        assert await checkpoints.newest_valid(RUN_ID) == (None, [])
        await checkpoints.publish(checkpoint_id(1), collection(1), expected=[("agent", "a")])
        await checkpoints.publish(checkpoint_id(1), collection(1), expected=[("agent", "a")])

    run(attempts())


@pytest.mark.parametrize("name", ["manifest", "episodes"])
def test_a_part_that_is_not_whole_is_not_published(name: str) -> None:
    fs = memory()

    async def attempt() -> None:
        await directory(fs).begin(checkpoint_id(1))
        await store(fs, 1, [opaque("o", 1)])
        damage(fs, 1, name)
        with pytest.raises(DamagedState):
            await directory(fs).publish(checkpoint_id(1), collection(1))

    run(attempt())
    assert listed(fs) == [(checkpoint_id(1), "unpublished")]


def test_an_id_is_never_used_twice() -> None:
    fs = memory()
    run(directory(fs).begin(checkpoint_id(1)))
    with pytest.raises(NotAsAsked, match="never used again"):
        run(directory(fs).begin(checkpoint_id(1)))
    with pytest.raises(NotAsAsked):
        run(directory(fs).begin("../x"))


def test_pruning_keeps_the_newest_whole_ones_and_the_named_ones() -> None:
    fs = memory()
    for sequence in range(1, 7):
        run(publish(fs, sequence, [opaque("o", sequence)], name="kept" if sequence == 2 else None))
    damage(fs, 6)
    assert sorted(run(directory(fs).prune(2))) == ids(1, 3)
    assert [name for name, _ in listed(fs)] == ids(2, 4, 5, 6)
    assert run(directory(fs).prune(0)) == ids(4)
    found, _ = run(directory(fs).newest_valid(RUN_ID))
    assert found is not None
    assert found.collection.sequence == 5


def test_pruning_makes_what_it_keeps_durable_before_it_removes_the_rest() -> None:
    """The last step of publishing fails: the checkpoint is seen, was never reported, and only memory holds its name."""
    fs = memory()
    run(publish(fs, 1, [opaque("o", 1)]))

    def before(operation: str, path: PurePath) -> None:
        if operation == "fsync_directory" and path == ROOT / checkpoint_id(2) and fs.find(path / CHECKPOINT):
            raise OSError(5, "I/O error", str(path))

    fs.before = before
    with pytest.raises(GymckptError):
        run(publish(fs, 2, [opaque("o", 2)]))
    fs.before = None
    assert run(directory(fs).prune(1)) == ids(1)
    found, _ = run(directory(fs.crashed(None)).newest_valid(RUN_ID))
    assert found is not None


def test_pruning_removes_what_was_never_published_but_not_what_is_being_made() -> None:
    fs = memory()

    async def begin() -> None:
        await directory(fs).begin(checkpoint_id(1))
        await store(fs, 1, [opaque("o", 1)])
        await publish(fs, 2, [opaque("o", 2)])
        await directory(fs).begin(checkpoint_id(3))
        fs.make_root(ROOT / "someone-elses")

    run(begin())
    assert run(directory(fs).prune(2)) == ids(1)
    assert sorted(name for name, _ in listed(fs)) == [*ids(2, 3), "someone-elses"]


def test_pruning_sweeps_what_a_crash_left_of_replacing_latest() -> None:
    fs = memory()
    for sequence in (1, 2):
        run(publish(fs, sequence, [opaque("o", sequence)]))
    fs.create(RUN / ".LATEST.0123456789abcdef.tmp").write(b"ckpt")
    fs.create(RUN / ".someone.tmp").write(b"else")
    run(directory(fs).prune(2))
    assert [entry.name for entry in fs.scan(RUN) if entry.kind == "file"] == [".someone.tmp", LATEST]


def test_pruning_another_runs_checkpoints_takes_that_runs_name() -> None:
    fs = memory()
    for sequence in (1, 2):
        run(publish(fs, sequence, [opaque("o", sequence)]))
    assert run(directory(fs).prune(1, "f" * 32)) == []


def test_a_symlink_is_never_followed_in_removing() -> None:
    fs = memory()
    run(directory(fs).begin(checkpoint_id(1)))
    fs.symlink(ROOT / checkpoint_id(1) / "gym")
    run(directory(fs).discard(checkpoint_id(1)))
    assert listed(fs) == []
    fs.symlink(ROOT / checkpoint_id(2))
    with pytest.raises(DamagedState):
        run(directory(fs).discard(checkpoint_id(2)))
    run(directory(fs).discard(checkpoint_id(3)))


def test_salvage_makes_a_smaller_checkpoint_of_what_can_still_be_read() -> None:
    fs, rng = memory(), random.Random(1)
    records = [opaque(f"o-{n}", rng.randbytes(300_000).hex()) for n in range(4)]
    published, _ = run(publish(fs, 1, records))
    damage(fs, 1, at=0.4)
    made = run(
        salvage(fs, INLINE, directory(fs), published, checkpoint_id(2), sequence=2, epoch=1, created_at=5.0),
    )
    assert [problem.episodes for problem in made.lost] == [(EpisodeId("o-1"),)]
    assert made.checkpoint.collection.continued == [EpisodeId(f"o-{n}") for n in (0, 2, 3)]
    assert made.checkpoint.collection.restarted == [Restarted(EpisodeId("o-1"), "damaged")]
    assert run(load(fs, 2)) == {r.episode: r.record for r in records if r.episode.rollout_id != "o-1"}
    found, _ = run(directory(fs).newest_valid(RUN_ID))
    assert found == made.checkpoint


@pytest.mark.parametrize(("kept", "lost"), [(0.6, ("o-2", "o-3")), (0.0, ("o-0", "o-1", "o-2", "o-3"))])
def test_a_segment_that_is_cut_or_missing_costs_its_own_episodes_and_no_others(
    kept: float, lost: tuple[str, ...]
) -> None:
    fs, rng = memory(), random.Random(1)
    episodes = tuple(EpisodeId(name) for name in lost)

    async def story() -> None:
        checkpoints = directory(fs)
        old = [opaque(f"o-{n}", rng.randbytes(300_000).hex()) for n in range(4)]
        _, first = await publish(fs, 1, old)
        made, _ = await publish(fs, 2, [*old, opaque("new", 1)], first.base)
        name = first.base.segments[0].file
        whole = fs.read(part(2) / name)
        fs.unlink(part(2) / name)
        if kept:
            write_new(fs, part(2) / name, whole[: int(len(whole) * kept)])
        for quick in (True, False):
            (problem,) = await checkpoints.verify(made, quick=quick)
            assert name in problem.what
            assert problem.episodes == episodes
        saved = await salvage(fs, INLINE, checkpoints, made, checkpoint_id(3), sequence=3, epoch=1, created_at=5.0)
        restarted = {restart.episode for restart in saved.checkpoint.collection.restarted}
        assert restarted == set(episodes)
        assert not await checkpoints.verify(saved.checkpoint)
        assert set(await load(fs, 3)) == {r.episode for r in [*old, opaque("new", 1)]} - restarted

    run(story())


@pytest.mark.parametrize("damaged", ["segment", "prefixes"])
def test_salvage_keeps_the_prefixes_it_can_read_and_never_an_episode_less_for_those_it_cannot(damaged: str) -> None:
    fs, rng = memory(), random.Random(1)
    prefixes = {n: {"token_ids": [n], "log_probs": [-0.5]} for n in range(3)}
    records = [replace(opaque(f"o-{n}", rng.randbytes(300_000).hex()), prefix=prefixes.get(n)) for n in range(4)]
    published, _ = run(publish(fs, 1, records))
    damage(fs, 1, damaged, at=0.4)
    made = run(salvage(fs, INLINE, directory(fs), published, checkpoint_id(2), sequence=2, epoch=1, created_at=5.0))

    async def read() -> dict[str, Any]:
        reader = ParticipantReader(fs, INLINE, part(2), kind="agent", instance="a")
        await reader.open()
        return {stored.episode.rollout_id: stored.prefix async for stored in reader.records()}

    if damaged == "segment":
        assert run(read()) == {"o-0": prefixes[0], "o-2": prefixes[2], "o-3": None}
    else:
        assert run(read()) == {f"o-{n}": None for n in range(4)}
        assert [("prefixes-" in problem.what, problem.episodes) for problem in made.lost] == [(True, ())]


def test_without_an_index_nothing_can_be_salvaged() -> None:
    fs = memory()
    published, _ = run(publish(fs, 1, [opaque("o", 1)]))
    damage(fs, 1, "episodes")
    with pytest.raises(DamagedState):
        run(salvage(fs, INLINE, directory(fs), published, checkpoint_id(2), sequence=2, epoch=1, created_at=5.0))
    assert isinstance(directory(fs), CheckpointDirectory)
    assert listed(fs) == [(checkpoint_id(1), "published")]


def test_a_manifest_of_another_checkpoint_is_damage_whatever_the_digests_say() -> None:
    fs = memory()
    run(publish(fs, 1, [opaque("r", 1)]))
    place, whole = part(1) / MANIFEST, ROOT / checkpoint_id(1) / CHECKPOINT
    manifest = seal(unseal(fs.read(place), "") | {"checkpoint_id": checkpoint_id(2)})
    named = unseal(fs.read(whole), "")
    for file in named["files"]:
        if file["path"].endswith(MANIFEST):
            file |= {"bytes": len(manifest), "sha256": hashlib.sha256(manifest).hexdigest()}
    for path, data in ((place, manifest), (whole, seal(named))):
        fs.unlink(path)
        fs.create(path).write(data)
    (problem,) = run(directory(fs).verify(run(directory(fs).open(checkpoint_id(1)))))
    assert f"of checkpoint {checkpoint_id(2)}, not of {checkpoint_id(1)}" in problem.what
