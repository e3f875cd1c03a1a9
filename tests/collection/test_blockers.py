"""Who is retired for blocking checkpoints, and who is only named."""

from gymckpt.collection.blockers import BlockerMemory, blocking_episodes
from gymckpt.identity import EpisodeId

R1, R2 = EpisodeId("r1"), EpisodeId("r2")


def test_a_rollout_that_alone_keeps_blocking_is_retired_for_it_once_and_then_only_named() -> None:
    memory = BlockerMemory()
    assert memory.missed(["r1"]) is None
    assert memory.missed(["r1"]) == R1
    assert memory.in_the_way({R1, R2}) is None
    assert memory.missed(["r1-a1"]) is None
    assert memory.missed(["r1-a1"]) is None
    assert memory.in_the_way({R1.next, R2}) == R1.next
    assert memory.in_the_way({R2}) is None
    assert memory.in_the_way({R1.next, R2}) is None


def test_two_rollouts_that_block_together_are_not_retired() -> None:
    memory = BlockerMemory()
    assert [memory.missed(["r1", "r2"]) for _ in range(5)] == [None] * 5


def test_a_request_without_an_episode_blocks_nobody_alone() -> None:
    memory = BlockerMemory()
    assert [memory.missed(["r1", "<POST /v1/responses>"]) for _ in range(5)] == [None] * 5
    assert blocking_episodes(["r1-a2", "<POST /x>", "r1-a2"]) == (EpisodeId("r1", 2),)


def test_a_checkpoint_in_between_or_another_culprit_begins_the_count_again() -> None:
    memory = BlockerMemory()
    memory.missed(["r1"])
    memory.succeeded()
    assert memory.missed(["r1"]) is None
    assert memory.missed(["r2"]) is None
    assert memory.missed(["r1"]) is None
