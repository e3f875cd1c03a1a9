"""What is in the wheel: every package of the tree, and the command line as gymckpt.commands."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("script", ["scripts/quickstart", "scripts/test", "scripts/environment", ".ci/run"])
def test_every_script_is_a_script(script: str) -> None:
    subprocess.run(["sh", "-n", script], cwd=CHECKOUT, check=True)
    if script != "scripts/environment":
        assert (CHECKOUT / script).stat().st_mode & 0o111


def test_the_batch_script_of_the_guide_is_one() -> None:
    (script,) = re.findall(r"```bash\n(.*?)```", (CHECKOUT / "docs" / "operating.md").read_text(), re.DOTALL)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "--resume" in script
    assert "75" in script
