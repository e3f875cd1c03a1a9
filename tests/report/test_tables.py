"""Tables on terminals of any width: what people copy is never broken, and what has no room is left out whole."""

import io

import pytest
from rich.console import Console, RenderableType

from gymckpt.report.documents import (
    BoundaryView,
    CheckpointView,
    CountsView,
    EpisodeView,
    EstimateView,
    InspectDocument,
    ProblemView,
    ReportDocument,
    ScoresView,
    ServerView,
    TaskView,
    VerifiedCheckpoint,
    VerifyDocument,
)
from gymckpt.report.tables import NARROW, WIDE, inspect_tables, report_tables, servers_table, verify_table

NOW_S = 1_800_000_000.0
NAME = "3f2a1b2c-12345-3"
CHECKPOINT = "ckpt-000007-01234567"


def drawn(what: RenderableType, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    with console.capture() as capture:
        console.print(what, markup=False)
    with console.capture() as marked:
        console.print(what, markup=True)
    assert marked.get() == capture.get()
    return capture.get()


def inspected() -> InspectDocument:
    boundary = BoundaryView(step="invoke_agent", number=12, at=NOW_S - 300)
    kinds = ["environment", "model", "agent", "resources"]
    episode = EpisodeView(
        rollout_id=NAME, attempt=1, boundary=boundary, turns=22, bytes=81_500, restart=None, kinds=kinds
    )
    listed = CheckpointView(
        checkpoint_id=CHECKPOINT, sequence=7, created_at=NOW_S - 300, valid=True, episodes=1, restarts=0, bytes=2700
    )
    return InspectDocument(
        run_id="3f2a1b2c" * 4,
        planned=100_000,
        succeeded=1,
        failed=2,
        omitted=3,
        unresolved=99_994,
        checkpoints=[listed],
        checkpoint_id=CHECKPOINT,
        episodes=[episode],
        truncated=False,
    )


def reported() -> ReportDocument:
    mean, low = EstimateView(value=0.5, low=0.25, high=0.75), EstimateView(value=0.25, low=None, high=None)
    scores = ScoresView(
        tasks=2,
        planned=8,
        samples=5,
        mean_scored=mean,
        mean_planned=low,
        pass_at={"1": 0.5},
        pass_at_planned={"1": 0.25, "4": 1.0},
    )
    return ReportDocument(
        run_id="3f2a1b2c" * 4,
        counts=CountsView(planned=8, succeeded=5, failed=3, omitted=0, unresolved=0),
        attempts=11,
        whole=scores,
        by_agent={"agent": scores},
        failures={"http_500": 1, "timeout": 2},
        tasks=[TaskView(task=0, samples=4, mean=0.5, passes=2)],
    )


@pytest.mark.parametrize("width", range(60, 201, 4))
def test_names_that_people_copy_are_whole_and_every_line_fits(width: int) -> None:
    text = drawn(inspect_tables(inspected(), NOW_S, width=width), width)
    assert max(map(len, text.splitlines())) <= width
    for name in (NAME, CHECKPOINT, "invoke_agent/12", "continues"):
        assert name in text


def test_facts_without_room_are_left_out_whole() -> None:
    for width, kept, turns in ((NARROW - 1, False, False), (NARROW, False, True), (WIDE, True, True)):
        text = drawn(inspect_tables(inspected(), NOW_S, width=width), width)
        assert ("environment model agent resources" in text) is kept
        assert ("81.5 kB" in text) is turns


def test_words_from_elsewhere_are_no_markup_and_styles_are_no_words() -> None:
    odd = "[red]odd[/red] \\[x]"
    document = inspected()
    (checkpoint,), (episode,) = document.checkpoints, document.episodes
    views = [checkpoint.model_copy(update={"name": odd}), checkpoint.model_copy(update={"valid": False})]
    document = document.model_copy(
        update={"checkpoints": views, "episodes": [episode.model_copy(update={"restart": odd})]}
    )
    text = drawn(inspect_tables(document, NOW_S), 240)
    assert f"named {odd}" in text
    assert f"starts over: {odd}" in text
    assert "damaged: gymckpt verify says where" in text
    assert "[red]damaged" not in text
    server = ServerView(instance="agent", url="http://agent", kind=None)
    asked = server.model_copy(update={"blockers": [odd], "blocker_count": 1})
    text = drawn(servers_table([server.model_copy(update={"problem": odd}), asked], NOW_S), 240)
    assert text.count(f" {odd} ") == 2
    report = reported()
    report = report.model_copy(update={"failures": {odd: 1}, "by_agent": {odd: report.whole}})
    assert drawn(report_tables(report), 240).count(f"{odd} ") == 2


def test_a_report_tells_both_denominators_and_fits_eighty_columns() -> None:
    lines = drawn(report_tables(reported()), 80).splitlines()
    assert max(map(len, lines)) <= 80
    samples, planned = (next(line for line in lines if of in line and "0." in line) for of in ("samples", "planned"))
    assert samples.split() == ["all", "samples", "2", "5", "0.5000", "0.2500", "to", "0.7500", "0.5000", "-"]
    assert planned.split() == ["planned", "2", "8", "0.2500", "-", "0.2500", "1.0000"]
    failed = [line.split() for line in lines if line.startswith(("timeout", "http_500"))]
    assert failed == [["timeout", "2"], ["http_500", "1"]]


@pytest.mark.parametrize(
    ("whole", "journal_damaged", "restorable", "said"),
    [
        (True, False, CHECKPOINT, f"a restore would use {CHECKPOINT}"),
        (True, True, None, "a restore refuses: what is damaged is outside the checkpoints"),
        (True, False, None, "a restore takes the directory of their run"),
        (False, False, None, "there is no checkpoint to restore"),
        (False, True, None, "there is no checkpoint to restore"),
    ],
)
def test_verify_says_what_a_restore_would_do(
    whole: bool, journal_damaged: bool, restorable: str | None, said: str
) -> None:
    damage = [ProblemView(file="journal/a.jsonl", what="journal/a.jsonl line 2: bad", episodes=[])]
    document = VerifyDocument(
        checkpoints=[VerifiedCheckpoint(checkpoint_id=CHECKPOINT, valid=whole, problems=[])],
        restorable=restorable,
        problems=damage if journal_damaged else [],
    )
    shown = drawn(verify_table(document), WIDE)
    assert said in shown
    assert ("there is no checkpoint" in shown) is not whole
