"""The directory of a checkpoint that was never published: rubbish, of which at most one is kept."""

import errno
import logging
import os

from gymckpt.errors import DamagedState, GymckptError, NoSpace
from gymckpt.storage.checkpoints import CheckpointDirectory

logger = logging.getLogger(__name__)


class Unpublished:
    """Keeps the last one, because a participant that wrote its part adds the next one to it; removes all others."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self._directory = directory
        self._kept: str | None = None

    async def failed(self, checkpoint_id: str, failure: GymckptError | OSError) -> None:
        """A checkpoint failed and is resumed everywhere. Its directory goes at once if space ran out."""
        await self.clear()
        self._kept = checkpoint_id
        if _space_ran_out(failure):
            await self.clear()

    async def clear(self) -> None:
        """Remove what is kept. What cannot be removed is left: it is rubbish anyway."""
        checkpoint_id, self._kept = self._kept, None
        try:
            if checkpoint_id is not None and not await self._was_published(checkpoint_id):
                await self._directory.discard(checkpoint_id)
        except (GymckptError, OSError) as error:
            logger.warning("cannot remove the unpublished %s: %s", checkpoint_id, error)

    async def _was_published(self, checkpoint_id: str) -> bool:
        """A publish can fail after its last file got its name: then it may count, and is left alone."""
        try:
            await self._directory.open(checkpoint_id)
        except DamagedState:
            return False
        return True


_FULL = ("no space", os.strerror(errno.EDQUOT).lower())


def _space_ran_out(failure: GymckptError | OSError) -> bool:
    # A participant tells of it in words only: its refusal has one code for every trouble with files.
    return isinstance(failure, NoSpace) or any(words in str(failure).lower() for words in _FULL)
