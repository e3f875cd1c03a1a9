"""Server classes of NeMo Gym whose `verify` waits while the file named by `HOLD` is there: `held:mcqa`.

Each counts as the class that it was made of: what is declared for that one, source and digest, is declared for it.
"""

import asyncio
import functools
import os
from typing import Any

from gymckpt.integrations.nemo_gym.server import load_class

HOLD = "GYMCKPT_TEST_HOLD"


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return _holding(load_class(f"resources_servers/{name}"))


def _holding(server_class: Any) -> Any:
    @functools.wraps(server_class.verify)
    async def verify(*arguments: Any, **named: Any) -> Any:
        while os.access(os.environ[HOLD], os.F_OK):  # noqa: ASYNC110 - another process takes the file away
            await asyncio.sleep(0.05)
        return await server_class.verify(*arguments, **named)

    # The name stays: cookies are named for it, and what is declared for a class is found by it.
    named = {"__module__": server_class.__module__, "__qualname__": server_class.__qualname__}
    return type(server_class)(server_class.__name__, (server_class,), {"verify": verify, **named})
