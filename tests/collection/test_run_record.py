"""run.json: what it says is what was written, or it is refused."""

import random
from pathlib import PurePath

import pytest

from gymckpt.collection.planfile import PlanSummary
from gymckpt.collection.rundirectory import RunPaths, RunRecord, read_run, write_run
from gymckpt.errors import DamagedState, GymckptError, NotAsAsked
from tests import corruption
from tests.simulation.files import MemoryFileSystem

ROOT = PurePath("/run")


def test_no_damage_to_run_json_is_believed() -> None:
    fs, paths = MemoryFileSystem(), RunPaths(ROOT)
    fs.make_root(ROOT)
    identity = {"tasks": "9" * 64}
    plan = PlanSummary(100, 50, "a" * 64, 3, 6, 2)
    record = RunRecord("0123456789abcdef" * 2, 1.5, identity, plan, ("environment/environment",), 4, {"keep": 2})
    write_run(fs, paths, record)
    assert read_run(fs, paths) == record
    good = fs.read(paths.run_json)
    for damaged in corruption.damages(good, random.Random(3)):
        fs.overwrite(paths.run_json, damaged)
        with pytest.raises(GymckptError) as refusal:
            read_run(fs, paths)
        assert isinstance(refusal.value, (DamagedState, NotAsAsked))
