"""Every setting is either part of what the run means, and refused by name, or operational: none can be forgotten."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gymckpt.collection.options import Every
from gymckpt.collection.runidentity import check_identity, differences, run_identity
from gymckpt.collection.settings import CollectSettings, scope_of, stored
from gymckpt.errors import NotAsAsked

OTHER: dict[str, Any] = {
    "limit": 3,
    "shuffle": True,
    "seed": 1,
    "repeats": {"*": 2},
    "agent": "a",
    "routes": {"t": "e"},
    "model": "m",
    "sampling": {"top_p": 0.5},
    "cohort": "group",
    "url": {"e": "http://h:1"},
    "gym_head": "http://h:2",
    "serve": True,
    "serve_config": Path("d.yaml"),
    "backend_url": "http://h:3",
    "control_token": SecretStr("s"),
    "control_token_file": Path("t"),
    "path_map": {"/a": "/b"},
    "restart_servers": False,
    "run_dir": Path("r"),
    "concurrency": 2,
    "agent_concurrency": {"a": 1},
    "max_attempts": 9,
    "rollout_timeout": 1.0,
    "control_timeout": 1.0,
    "server_timeout": 1.0,
    "group_readable": True,
    "checkpoint_every": Every(1.0),
    "checkpoint_timeout": 1.0,
    "commit_timeout": 1.0,
    "restore_timeout": 1.0,
    "keep": 7,
    "max_checkpoint_failures": 3,
    "grace": 1.0,
    "resume": True,
    "overwrite": True,
    "start_over": True,
    "salvage": True,
    "steal_lock": True,
    "accept_change": ("seed",),
    "dry_run": True,
}
"""Another value for every setting but `tasks`, whose rows count and not its name."""

BASE = CollectSettings(tasks="tasks.jsonl")


def test_every_setting_has_another_value_to_try() -> None:
    assert set(OTHER) == set(CollectSettings.model_fields) - {"tasks"}


@pytest.mark.parametrize("name", sorted(OTHER))
def test_one_changed_field_is_refused_by_name_or_is_operational(name: str) -> None:
    old = run_identity(BASE, "digest")
    new = run_identity(CollectSettings(tasks="tasks.jsonl", **{name: OTHER[name]}), "digest")
    if scope_of(name) == "identity":
        assert [difference.name for difference in differences(old, new)] == [name]
        with pytest.raises(NotAsAsked, match=f"  {name}: the run has "):
            check_identity(old, new)
        assert [difference.name for difference in check_identity(old, new, (name,))] == [name]
    else:
        assert new == old


def test_rows_are_the_same_whatever_their_file_is_called() -> None:
    assert run_identity(BASE, "digest") == run_identity(CollectSettings(tasks="moved.jsonl.gz"), "digest")
    assert [d.name for d in differences(run_identity(BASE, "digest"), run_identity(BASE, "other"))] == ["tasks"]


@pytest.mark.parametrize("name", ["url", "run_dir", "control_token", "control_token_file", "concurrency"])
def test_ports_credentials_and_paths_are_no_part_of_what_a_run_means(name: str) -> None:
    assert scope_of(name) == "operational"


def test_settings_of_one_command_are_stored_nowhere() -> None:
    kept = stored(CollectSettings(tasks="t", **{name: OTHER[name] for name in ("resume", "steal_lock", "dry_run")}))
    assert not {name for name in kept if scope_of(name) == "verb"}
