"""Names of run directories that nobody gave a name."""

from commands.places import fresh_directory


def test_two_runs_in_one_second_get_two_names() -> None:
    names = {fresh_directory() for _ in range(100)}
    assert len(names) == 100
