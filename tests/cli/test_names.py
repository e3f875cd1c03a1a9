"""A name that a user gives to a checkpoint is that checkpoint's."""

from pathlib import Path

import pytest

from tests.cli.runs import collecting, deployment_file, until
from tests.cli.terminal import gymckpt, inline


@pytest.mark.slow
def test_a_name_is_given_once_while_its_checkpoint_is_there(tmp_path: Path) -> None:
    slow = str(deployment_file(tmp_path, 2.0))
    arguments = ["@workbench", "--limit", "4", "--serve-config", slow, "--checkpoint-every", "off"]
    with collecting(*arguments, "--run-dir", "run", cwd=tmp_path) as process:
        until(process, "started")
        named = gymckpt("checkpoint", "run", "--name", "before", cwd=tmp_path)
        assert named.returncode == 0, named.stderr
        again = gymckpt("checkpoint", "run", "--name", "before", cwd=tmp_path)
        assert again.returncode == 3
        assert f"before is the name of {named.stdout.strip()} already" in again.stderr
        assert gymckpt("checkpoint", "run", "--name", "after", cwd=tmp_path).returncode == 0
    run = tmp_path / "run"
    assert len(list((run / "checkpoints").iterdir())) == 2
    assert inline("verify", str(run)).returncode == 0
