"""`genrm_compare`, whose verify waits until all rollouts of a prompt have come: cohorts across kills."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.hosting import Host
from tests.interop.mixes import MixedSite, example_rows, flat, our_agent, our_model, worker
from tests.interop.verifiers import Verifier
from tests.process.processes import run

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

MEMBERS, PROMPTS = 4, 2
VERDICT = '{"score_1": 5, "score_2": 2, "ranking": 1}'
COHORTS = ("--cohort", "prompt", "--repeats", str(MEMBERS))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    genrm = Verifier("genrm_compare", "genrm_compare", verdict=VERDICT, overrides={"num_rollouts_per_prompt": MEMBERS})
    host = Host(
        MixedSite(tmp_path_factory.mktemp("cohorts")),
        [our_agent(resources_server="genrm_compare"), our_model(), worker(), *genrm.servers],
    )
    host.start()
    try:
        yield host
    finally:
        host.kill()


@pytest.fixture(scope="module")
def tasks(host: Host) -> str:
    rows = []
    for number, row in enumerate(example_rows("genrm_compare")[:PROMPTS]):
        params = {**row["responses_create_params"], "metadata": {"answer": f"answer {number}"}}
        rows.append({**row, "responses_create_params": params})
    return host.site.task_file(flat(rows))


@pytest.fixture(scope="module")
def undisturbed(host: Host, tasks: str) -> list[tuple[int, float]]:
    """(task, reward) of every member."""
    directory = host.site.root / "undisturbed"
    command = host.collect(tasks, directory, *COHORTS, "--concurrency", "16", "--checkpoint-every", "off")
    try:
        assert command.finish() == 0, command.describe()
    finally:
        command.close()
    return rewards(directory)


def rewards(directory: Path) -> list[tuple[int, float]]:
    """(task, reward), once for each rollout that has a row."""
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (directory / "rollouts.jsonl").read_text().split("\n") if line
    ]
    assert set(Counter(row["_ng_rollout_id"] for row in rows).values()) == {1}
    return sorted((row["_ng_task_index"], row["reward"]) for row in rows)


def test_a_cohort_killed_while_it_is_compared_is_compared_again_as_a_whole(
    host: Host, tasks: str, undisturbed: list[tuple[int, float]]
) -> None:
    directory = host.site.root / "killed"

    def verifying() -> bool:
        episodes = run("inspect", str(directory), "--json")["episodes"]
        steps = [(one["boundary"] or {}).get("step") for one in episodes if one["restart"] is None]
        return steps.count("verify") == MEMBERS * PROMPTS

    host.hold.touch()
    command = host.collect(tasks, directory, *COHORTS, "--concurrency", "16", "--checkpoint-every", "1s")
    try:
        assert command.wait_checkpoint(verifying), command.describe()
        command.kill_everything()
        host.kill()
    finally:
        command.close()
        host.hold.unlink()
    host.start()
    _finish(host, directory)
    assert rewards(directory) == undisturbed


@pytest.mark.parametrize("passage", [1, MEMBERS - 1, 2 * MEMBERS - 1])
def test_a_crash_between_a_cohorts_result_and_its_recording_leaves_no_half(
    host: Host, tasks: str, undisturbed: list[tuple[int, float]], passage: int
) -> None:
    """Before the first reply is durable, between two replies, between two outcomes of the first cohort."""
    directory = host.site.root / f"crashed-{passage}"
    command = host.collect(
        tasks,
        directory,
        *(*COHORTS, "--concurrency", str(MEMBERS), "--checkpoint-every", "1s"),
        GYMCKPT_CRASH_AT=f"collector.outcome.before_journal:kill:{passage}",
    )
    try:
        assert command.finish() == -9, command.describe()
    finally:
        command.close()
    _finish(host, directory)
    assert rewards(directory) == undisturbed


def _finish(host: Host, directory: Path) -> None:
    resumed = host.restore(directory)
    try:
        assert resumed.finish() == 0, resumed.describe()
    finally:
        resumed.close()
