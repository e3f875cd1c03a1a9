"""What is in the wheel: every package of the tree, and the command line as gymckpt.commands."""

import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def test_every_package_of_the_tree_is_in_the_wheel() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {".".join(init.parent.relative_to(CHECKOUT).parts) for init in (CHECKOUT / "gymckpt").rglob("__init__.py")}
    assert listed == found | {"gymckpt.commands"}


def test_nobody_gets_a_top_level_package_called_commands() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    assert "commands" not in project["tool"]["setuptools"]["packages"]
    assert project["tool"]["setuptools"]["package-dir"]["gymckpt.commands"] == "commands"
