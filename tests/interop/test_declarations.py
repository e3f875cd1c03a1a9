"""The table of declared verifiers against the NeMo Gym that is installed."""

import importlib.metadata

import pytest

from gymckpt.integrations.nemo_gym.declarations import DECLARATIONS, REVIEWED, STATEFUL, VERIFIERS, source_sha256
from tests.interop.verifiers import COHORTS, NOT_OFFLINE, RUN_OFFLINE, folder

pytestmark = pytest.mark.interop


def test_the_installed_release_is_the_one_that_was_reviewed() -> None:
    assert f"nemo-gym {importlib.metadata.version('nemo-gym')}" == REVIEWED


@pytest.mark.parametrize("key", sorted(DECLARATIONS))
def test_a_declared_class_is_there_as_it_was_reviewed(key: str) -> None:
    module, _, name = key.partition(":")
    place = folder(module.split(".")[1])
    assert f"class {name}(" in (place / "app.py").read_text(), f"{key} is gone: take it out of the table"
    assert source_sha256(place) == DECLARATIONS[key].source_sha256, (
        f"{key} has changed: read its verify again (may it be asked twice, does it look at the answer alone?), "
        "then write the new digest into gymckpt/integrations/nemo_gym/declarations.py"
    )


def test_each_declared_verifier_is_run_or_has_a_reason_why_not() -> None:
    named = {one.name for one in RUN_OFFLINE} | set(NOT_OFFLINE) | set(COHORTS)
    assert named == {key.split(".")[1] for key in VERIFIERS}
    assert len(named) == 20
    assert not set(VERIFIERS) & set(STATEFUL)
