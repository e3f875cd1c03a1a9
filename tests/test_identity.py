"""Names are safe, unique and read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymckpt.errors import CONTROL_ERRORS, GymckptError, InvalidRolloutId, UsageError
from gymckpt.identity import EpisodeId, check_rollout_id, checkpoint_sequence, is_safe_name, new_checkpoint_id

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}", fullmatch=True)


@given(names, st.integers(0, 10**9))
def test_a_capture_key_reads_back_as_its_episode(rollout_id: str, attempt: int) -> None:
    try:
        check_rollout_id(rollout_id)
    except InvalidRolloutId:
        return
    episode = EpisodeId(rollout_id, attempt)
    assert EpisodeId.parse(episode.capture_key) == episode


@given(st.text(max_size=200))
def test_whatever_passes_as_a_name_is_one_path_segment(text: str) -> None:
    if is_safe_name(text):
        assert "/" not in text
        assert "\0" not in text
        assert text not in {".", ".."}
        assert text.isascii()


@given(st.text(max_size=60))
def test_reading_a_capture_key_gives_an_episode_or_a_clear_refusal(text: str) -> None:
    try:
        episode = EpisodeId.parse(text)
    except InvalidRolloutId:
        return
    assert episode.capture_key == text


def test_an_attempt_suffix_with_a_leading_zero_is_part_of_the_name() -> None:
    assert EpisodeId.parse("r-a0") == EpisodeId("r-a0", 0)
    assert EpisodeId.parse("r-a01") == EpisodeId("r-a01", 0)


def test_checkpoint_ids_never_repeat_and_carry_their_sequence() -> None:
    made = {new_checkpoint_id(7) for _ in range(1000)}
    assert len(made) == 1000
    assert {checkpoint_sequence(name) for name in made} == {7}
    with pytest.raises(UsageError, match="not a checkpoint id"):
        checkpoint_sequence("../ckpt-000001-00000000")


def every_error(kind: type[GymckptError] = GymckptError) -> list[type[GymckptError]]:
    return [kind, *(found for sub in kind.__subclasses__() for found in every_error(sub))]


def test_every_error_has_an_exit_code_that_the_command_line_documents() -> None:
    assert {error.exit_code for error in every_error()} <= {2, 3, 4, 5, 70, 75}
    assert all(CONTROL_ERRORS[code].code == code for code in CONTROL_ERRORS)
