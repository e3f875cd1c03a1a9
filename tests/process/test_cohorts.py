"""A cohort of the bundled deployment, its collector killed between its results and their recording."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gymckpt.crashpoints import ENVIRONMENT_VARIABLE
from gymckpt.tasksets import task_rows
from gymckpt.tasksets.pairwise import judge_prompt, score_of
from gymckpt.tasksets.policy import decide
from tests.process.deployments import Site

COHORT = 4
ROLLOUTS = 2 * COHORT
COLLECT = ("@pairwise", "--limit", str(ROLLOUTS), "--concurrency", str(COHORT), "--checkpoint-every", "500ms")


def said(content: str, seed: str = "") -> str:
    return decide([{"role": "user", "content": content}], [], seed).text


def expected() -> dict[int, float]:
    """Rewards by task index, from the task set alone."""
    rewards: dict[int, float] = {}
    rows = [row["task_input"] for row in itertools.islice(task_rows("pairwise"), ROLLOUTS)]
    answers = [
        said(row["responses_create_params"]["input"][0]["content"], row["responses_create_params"]["metadata"]["seed"])
        for row in rows
    ]
    for start in range(0, ROLLOUTS, COHORT):
        won = Counter[int]()
        for a, b in itertools.combinations(range(start, start + COHORT), 2):
            score = score_of(said(judge_prompt(rows[a]["task_data"]["question"], answers[a], answers[b])))
            assert score is not None
            won[a] += int(2 * score)
            won[b] += int(2 - 2 * score)
        rewards.update({index: won[index] / 2 / (COHORT - 1) for index in range(start, start + COHORT)})
    return rewards


@pytest.mark.parametrize("passage", [3, 7], ids=["between_replies", "between_outcomes"])
def test_a_cohort_is_counted_whole_and_once_although_its_collector_died_in_the_middle(
    tmp_path: Path, passage: int
) -> None:
    site = Site(tmp_path, latency_s=0.0).prepare(pairwise={"judge_delay_s": 2.0})
    armed = {ENVIRONMENT_VARIABLE: f"collector.outcome.before_journal:kill:{passage}"}
    command, resumed = site.collect(*COLLECT, environment=armed), None
    try:
        assert command.finish() == -9
        assert any(event["event"] == "checkpoint" for event in command.events), command.describe()
        assert len(site.rows()) < COHORT
        resumed = site.restore()
        assert resumed.finish() == 0, resumed.describe()
        found: list[dict[str, Any]] = site.rows()
        assert {row["_ng_task_index"]: pytest.approx(row["reward"]) for row in found} == expected()
        assert len(found) == ROLLOUTS
    finally:
        for started in (command, resumed):
            if started is not None:
                started.close()
