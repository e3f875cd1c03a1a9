"""A class that says of itself what cannot hold is refused when its app is made."""

from pathlib import Path
from typing import Any

import pytest

from gymckpt.errors import UsageError
from gymckpt.jsoncodec import Json
from gymckpt.servers.resources.app import resources_app
from gymckpt.servers.resources.server import ResourcesServer
from tests.servers.resources_desk import on


async def export(self: Any, session_id: str) -> Json:
    return None


async def restore(self: Any, session_id: str, state: Json) -> None:
    return None


EXPORTS = {"checkpoint_mode": "exported", "export_session_state": export}
WHOLE = {**EXPORTS, "restore_session_states": restore}


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"checkpoint_mode": "export"}, "Mine.checkpoint_mode is 'export': it must be one of stateless, exported, "),
        ({**WHOLE, "checkpoint_verify": "maybe"}, "Mine.checkpoint_verify is 'maybe': it must be one of wait, replay"),
        ({**WHOLE, "checkpoint_mode": []}, r"Mine.checkpoint_mode is \[\]"),
        ({"checkpoint_mode": "exported"}, "Mine.* has no export_session_state"),
        (EXPORTS, "Mine.* has no restore_session_state"),
        ({**WHOLE, "compares_cohorts": True}, "Mine.compares_cohorts .* exported, verify wait: it must be stateless"),
        ({"compares_cohorts": True, "checkpoint_mode": "stateless"}, "Mine.compares_cohorts .* verify wait"),
    ],
)
def test_what_cannot_hold_is_refused_by_class_and_attribute(tmp_path: Path, members: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resources_app(type("Mine", (ResourcesServer,), members)("mine"), on(tmp_path))


def test_a_hook_for_a_batch_is_as_good_as_one_for_a_session(tmp_path: Path) -> None:
    resources_app(type("Mine", (ResourcesServer,), WHOLE)("mine"), on(tmp_path))
