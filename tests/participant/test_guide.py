"""The participant in the guide is a real one."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from pydantic import SecretStr

from gymckpt.settings import CheckpointSettings
from gymckpt.wire.control import PREFIX
from tests.participant.stand import X, Y

GUIDE = Path(__file__).parents[2] / "docs" / "participants.md"


def server_of_the_guide(root: Path) -> FastAPI:
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert code is not None
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(code[1], str(GUIDE), "exec"), names)  # the documentation's own code is what is tested
    app = names["build"]("notes", CheckpointSettings(enabled=True, control_auth_token=SecretStr("t"), root=root))
    assert isinstance(app, FastAPI)
    return app


def test_the_participant_of_the_guide_goes_on_after_a_crash(tmp_path: Path) -> None:
    async def rule() -> None:
        first = client(server_of_the_guide(tmp_path))
        early = await first.post("/ng-rollout/r/write", json={"note": "x"})
        assert (early.status_code, early.json()["error"]["code"]) == (409, "unknown_session")
        await first.post("/ng-rollout/r/begin")
        for number in (1, 2):
            reply = await first.post("/ng-rollout/r/write", json={"note": "x"})
            assert reply.json() == {"notes": number}
        where = {"checkpoint_dir": str(tmp_path / X), "episode_ids": [{"rollout_id": "r"}]}
        assert (await control(first, "prepare", X))["phase"] == "prepared"
        assert (await control(first, "commit", X, **where))["episode_ids"] == ["r"]
        second = client(server_of_the_guide(tmp_path))
        assert (await control(second, "restore", Y, **where))["restored"] == ["r-a1"]
        await control(second, "resume", Y)
        assert (await second.post("/ng-rollout/r-a1/begin")).json() == {"notes": 2}
        assert (await second.post("/ng-rollout/r-a1/write", json={"note": "x"})).json() == {"notes": 3}
        late = await second.post("/ng-rollout/r/write", json={"note": "x"})
        assert (late.status_code, late.json()["error"]["code"]) == (409, "stale_attempt")
        nobody = await second.post("/write", json={"note": "x"})
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (400, "rollout_id_required")

    asyncio.run(rule())


def client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://notes")


async def control(server: httpx.AsyncClient, name: str, checkpoint_id: str, **more: Any) -> dict[str, Any]:
    body = {"checkpoint_id": checkpoint_id, "deadline_ts": time.time() + 20, **more}
    reply = await server.post(f"{PREFIX}/{name}", json=body, headers={"authorization": "Bearer t"})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found
