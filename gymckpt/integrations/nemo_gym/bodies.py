"""What the bodies of Gym's requests say, as far as a wrapper looks into them."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from gymckpt import jsoncodec
from gymckpt.errors import InvalidRolloutId
from gymckpt.identity import EpisodeId
from gymckpt.wire.control import EpisodeRef
from gymckpt.wire.gym import ATTEMPT_INDEX, ROLLOUT_ID


def object_in(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; an empty one for anything else: the wrapped app itself says what is wrong with it."""
    try:
        value = jsoncodec.loads(body) if body else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def episode_in(fields: Mapping[str, Any]) -> EpisodeId | None:
    """The episode that a body names: typed, or as a flat row. Indexes alone name none: they are another run's too."""
    reference = fields.get("episode_id")
    if not isinstance(reference, dict):
        if not isinstance(fields.get(ROLLOUT_ID), str):
            return None
        reference = {"rollout_id": fields[ROLLOUT_ID], "attempt": fields.get(ATTEMPT_INDEX) or 0}
    try:
        return EpisodeRef.model_validate(reference).episode
    except (ValidationError, InvalidRolloutId):
        return None
