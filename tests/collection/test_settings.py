"""Settings: sources in order, origins, and what each field decides."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from gymckpt.collection import origins
from gymckpt.collection.options import Every
from gymckpt.collection.settings import CollectSettings, scope_of, stored
from gymckpt.errors import UsageError


def test_the_nearer_source_wins_and_each_value_says_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.gymckpt]\nconcurrency = 1\nkeep = 9\ngrace = '7s'\n")
    (tmp_path / "gymckpt.toml").write_text("concurrency = 2\nlimit = 5\n[sampling]\ntop_p = 0.5\n")
    (tmp_path / ".env").write_text("GYMCKPT_CONCURRENCY=3\nOTHER=1\nGYMCKPT_UNKNOWN=1\nGYMCKPT_SEED=4\n")
    monkeypatch.setenv("GYMCKPT_CONCURRENCY", "4")
    monkeypatch.setenv("GYMCKPT_SAMPLING__TEMPERATURE", "0.25")
    monkeypatch.setenv("GYMCKPT_CRASH_AT", "nowhere")
    loaded = origins.load({"concurrency": 5}, directory=tmp_path)
    settings = loaded.settings
    assert (settings.concurrency, settings.limit, settings.seed, settings.keep, settings.grace) == (5, 5, 4, 9, 7.0)
    assert settings.sampling.overrides() == {"temperature": 0.25, "top_p": 0.5}
    assert loaded.origins["concurrency"] == "command line"
    assert loaded.origins["limit"] == "gymckpt.toml"
    assert loaded.origins["seed"] == ".env"
    assert loaded.origins["keep"] == "pyproject.toml"
    assert loaded.origins["max_attempts"] == "default"
    monkeypatch.setenv("GYMCKPT_CHECKPOINT_EVERY", "5m,200ep")
    again = origins.load(directory=tmp_path)
    assert (again.settings.concurrency, again.settings.checkpoint_every) == (4, Every(300.0, 200))
    assert again.origins["concurrency"] == "environment GYMCKPT_CONCURRENCY"


def test_a_restore_takes_what_the_run_stored_unless_a_flag_says_otherwise(tmp_path: Path) -> None:
    first = origins.load({"concurrency": 7, "repeats": "a=2,*=3", "url": ["e=http://h:1"]}, directory=tmp_path)
    again = origins.load({"url": ["e=http://h:2"]}, directory=tmp_path, run=stored(first.settings))
    assert (again.settings.concurrency, again.settings.repeats) == (7, {"a": 2, "*": 3})
    assert again.settings.url == {"e": "http://h:2"}
    assert again.origins["concurrency"] == "run.json"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"invented": 1}, "invented"),
        ({"url": ["environment"]}, "not NAME=VALUE"),
        ({"url": ["e=ftp://h"]}, "not an http"),
        ({"checkpoint_every": "5x"}, "5x"),
        ({"grace": "soon"}, "not a duration"),
        ({"repeats": "0"}, "is not from 1"),
        ({"overwrite": True, "resume": True}, "contradict"),
    ],
)
def test_a_wrong_setting_is_one_message_that_names_it(tmp_path: Path, values: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        origins.load(values, directory=tmp_path)


@pytest.mark.parametrize(
    ("text", "every"),
    [("5m", Every(300.0)), ("200ep", Every(None, 200)), ("90s,2ep", Every(90.0, 2)), ("off", Every())],
)
def test_a_cadence_is_read_and_written_the_same(text: str, every: Every) -> None:
    assert Every.parse(text) == every
    assert str(every) == text


def test_every_setting_says_whether_it_changes_the_meaning_of_the_run() -> None:
    assert {scope_of(name) for name in CollectSettings.model_fields} == {"identity", "operational", "verb"}
    assert all(field.description for field in CollectSettings.model_fields.values())


def test_a_secret_is_in_no_stored_settings_and_in_no_text() -> None:
    settings = CollectSettings(control_token=SecretStr("hunter2"), control_token_file=Path("secret.txt"))
    assert "hunter2" not in repr(settings) + str(settings) + str(stored(settings))
    assert "control_token" not in stored(settings)
