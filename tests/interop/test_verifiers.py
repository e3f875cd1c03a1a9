"""Each verifier that can run offline, killed while its verify is held open: asked again, it gives the same verdict."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.interop.hosting import Host, rows_of
from tests.interop.mixes import MixedSite, our_agent, our_environment, our_model, worker
from tests.interop.verifiers import ROWS_EACH, RUN_OFFLINE
from tests.process.processes import run

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]


@dataclass
class Told:
    """Rows by task: of an undisturbed run, and of one that was killed while everything was being verified."""

    undisturbed: dict[int, Any]
    after_kill: dict[int, Any]

    def of(self, name: str) -> list[tuple[Any, Any]]:
        begin = [verifier.name for verifier in RUN_OFFLINE].index(name) * ROWS_EACH
        return [(self.undisturbed.get(n), self.after_kill.get(n)) for n in range(begin, begin + ROWS_EACH)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    site = MixedSite(tmp_path_factory.mktemp("verifiers"))
    tasksets = {verifier.name: verifier.name for verifier in RUN_OFFLINE}
    servers = [our_environment(**tasksets), our_agent(), our_model(), worker()]
    host = Host(site, [*servers, *(one for verifier in RUN_OFFLINE for one in verifier.servers)])
    tasks = site.task_file([row for verifier in RUN_OFFLINE for row in verifier.rows()])
    host.start()
    try:
        undisturbed = site.root / "undisturbed"
        command = host.collect(tasks, undisturbed, "--checkpoint-every", "off")
        assert command.finish(300) in (0, 1), command.describe()
        command.close()
        killed = site.root / "killed"
        _kill_while_verifying(host, tasks, killed, len(rows_of(undisturbed)))
        host.start()
        resumed = host.restore(killed)
        assert resumed.finish(300) in (0, 1), resumed.describe()
        resumed.close()
        yield Told(rows_of(undisturbed), rows_of(killed))
    finally:
        host.kill()


def _kill_while_verifying(host: Host, tasks: str, directory: Path, count: int) -> None:
    """SIGKILL collector and servers once a checkpoint holds all episodes where their verify has begun."""

    def verifying() -> bool:
        episodes = run("inspect", str(directory), "--json")["episodes"]
        steps = [(one["boundary"] or {}).get("step") for one in episodes if one["restart"] is None]
        return steps.count("verify") >= count

    host.hold.touch()
    command = host.collect(tasks, directory, "--checkpoint-every", "1s", "--concurrency", "64")
    try:
        assert command.wait_checkpoint(verifying), command.describe()
        command.kill_everything()
        host.kill()
    finally:
        command.close()
        host.hold.unlink()


@pytest.mark.parametrize("name", [verifier.name for verifier in RUN_OFFLINE])
def test_the_verdict_after_a_kill_is_the_verdict(told: Told, name: str) -> None:
    for undisturbed, after_kill in told.of(name):
        assert undisturbed is not None, "no verdict in the undisturbed run"
        assert after_kill is not None, "no verdict after the kill"
        assert after_kill["reward"] == undisturbed["reward"]
        assert after_kill["_ng_attempt_index"] == 1
        assert _verdict(after_kill) == _verdict(undisturbed)


# math-verify simplifies what it extracted under a time limit, so what it shows of it depends on the machine's load.
VOLATILE = ("response", "responses_create_params", "_ng_rollout_id", "_ng_attempt_index", "extracted_answer")


def _verdict(row: dict[str, Any]) -> str:
    """What the verifier added to the row, without what is new in every run: ids, and how long something took."""
    return json.dumps(_lasting({name: value for name, value in row.items() if name not in VOLATILE}), sort_keys=True)


def _lasting(value: Any) -> Any:
    match value:
        case dict():
            return {n: _lasting(v) for n, v in value.items() if n != "id" and not n.endswith("time_taken")}
        case list():
            return [_lasting(item) for item in value]
    return value
