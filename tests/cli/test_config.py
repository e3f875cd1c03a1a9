"""Flag, variable and file say the same thing, and `config --origin` says which one did."""

import json
from pathlib import Path

from commands import flags
from gymckpt.collection.settings import CollectSettings
from tests.cli.terminal import gymckpt


def test_every_setting_but_a_secret_has_a_flag() -> None:
    shown = gymckpt("config", "--help", env={"COLUMNS": "200"}).stdout
    for name in CollectSettings.model_fields:
        if name in ("tasks", "sampling", "control_token"):
            continue
        assert flags.flag(name) in shown, name
    assert "--temperature" in shown
    assert "--control-token " not in shown


def test_the_first_source_that_has_a_value_wins(tmp_path: Path) -> None:
    (tmp_path / "gymckpt.toml").write_text("concurrency = 2\nkeep = 5\ngrace = '10s'\n")
    variables = {"GYMCKPT_CONCURRENCY": "3", "GYMCKPT_KEEP": "4"}
    shown = json.loads(gymckpt("config", "--json", "--keep", "6", cwd=tmp_path, env=variables).stdout)["settings"]
    assert (shown["keep"]["value"], shown["keep"]["origin"]) == (6, "command line")
    assert (shown["concurrency"]["value"], shown["concurrency"]["origin"]) == (3, "environment GYMCKPT_CONCURRENCY")
    assert (shown["grace"]["value"], shown["grace"]["origin"]) == (10.0, "gymckpt.toml")
    assert (shown["max_attempts"]["value"], shown["max_attempts"]["origin"]) == (3, "default")


def test_every_flag_reaches_its_setting() -> None:
    given = ["--url", "a=http://h:1", "--url", "b=http://h:2", "--no-restart-servers", "--param", "stop=[1]"]
    given += ["--accept-change", "limit", "--checkpoint-every", "5m,200ep", "--repeats", "4", "--shuffle"]
    shown = json.loads(gymckpt("config", "tasks.jsonl", "--json", *given).stdout)["settings"]
    assert shown["tasks"]["value"] == "tasks.jsonl"
    assert shown["url"]["value"] == {"a": "http://h:1", "b": "http://h:2"}
    assert shown["restart_servers"]["value"] is False
    assert shown["sampling"]["value"]["params"] == {"stop": [1]}
    assert shown["accept_change"]["value"] == ["limit"]
    assert shown["checkpoint_every"]["value"] == "5m,200ep"
    assert shown["repeats"]["value"] == {"*": 4}
    assert shown["shuffle"]["value"] is True


def test_the_token_is_shown_nowhere() -> None:
    done = gymckpt("config", "--origin", env={"GYMCKPT_CONTROL_TOKEN": "not-for-your-eyes"})
    assert done.returncode == 0
    assert "not-for-your-eyes" not in done.stdout + done.stderr


def test_a_wrong_value_names_the_setting_and_its_source() -> None:
    done = gymckpt("config", env={"GYMCKPT_CONCURRENCY": "many"})
    assert done.returncode == 2
    assert "concurrency" in done.stderr
    assert "GYMCKPT_CONCURRENCY" in done.stderr


def test_a_variable_that_is_almost_a_setting_is_told_and_others_are_not() -> None:
    done = gymckpt("config", env={"GYMCKPT_CONCURENCY": "9", "GYMCKPT_OF_SOMEBODY_ELSE": "1"})
    assert done.returncode == 0
    assert "GYMCKPT_CONCURENCY in the environment is no setting" in done.stderr
    assert "did you mean GYMCKPT_CONCURRENCY?" in done.stderr
    assert "SOMEBODY_ELSE" not in done.stderr
