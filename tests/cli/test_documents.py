"""What README and docs/ say is so: verbs, flags, exit codes, links, files."""

import functools
import json
import re
from pathlib import Path

import pytest

from commands import app, flags
from gymckpt import errors
from gymckpt.collection.routing import Routing, Server
from gymckpt.collection.rows import read_row
from gymckpt.collection.settings import CollectSettings, Sampling
from gymckpt.identity import TaskId
from gymckpt.ports import ServerRef
from tests.cli.terminal import inline

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
VERBS = {command.name for command in app.app.registered_commands if command.name}
OTHER_PROGRAMS = ("srun", "#SBATCH", "scontrol", "openssl", "scripts/", ".ci/run", "pip", "strace")

_EXIT_ROW = re.compile(r"^\| (\d+) \| (.+) \|$", re.MULTILINE)


def _classes(error: type[errors.GymckptError]) -> list[type[errors.GymckptError]]:
    return [error, *(found for child in error.__subclasses__() for found in _classes(child))]


@pytest.mark.parametrize("document", ["README.md", "docs/operating.md"])
def test_the_table_of_exit_codes_is_that_of_the_errors(document: str) -> None:
    documented = {int(code) for code, _ in _EXIT_ROW.findall((CHECKOUT / document).read_text())}
    ours = {error.exit_code for error in _classes(errors.GymckptError) if error.__module__.startswith("gymckpt")}
    assert documented == ours | {0, 1, app.INTERNAL_ERROR}


def test_both_tables_of_exit_codes_say_the_same() -> None:
    readme, operating = (
        _EXIT_ROW.findall((CHECKOUT / name).read_text()) for name in ("README.md", "docs/operating.md")
    )
    assert readme == operating


def test_the_table_of_verbs_is_complete() -> None:
    listed = set(re.findall(r"^\| `([a-z-]+)` \|", (CHECKOUT / "README.md").read_text(), re.MULTILINE))
    assert listed == VERBS - {"crash-points"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_verb_that_a_document_names_exists(document: Path) -> None:
    # At the beginning of a code span, of a line of a code block, or after `bin/`; elsewhere it is prose.
    assert set(re.findall(r"(?:`|^ *|bin/)gymckpt ([a-z][a-z-]+)", document.read_text(), re.MULTILINE)) <= VERBS


@functools.cache
def _known_flags() -> set[str]:
    known = {flags.flag(name) for name in (*CollectSettings.model_fields, *Sampling.model_fields)}
    for verb in VERBS - {"collect", "restore", "config"}:
        known |= set(re.findall(r"--[a-z][a-z-]+", inline(verb, "--help").stdout))
    return known | {"--help", "--version", "--debug", "--json", "--origin"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_that_a_document_names_exists(document: Path) -> None:
    lines = [line for line in document.read_text().split("\n") if not any(other in line for other in OTHER_PROGRAMS)]
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(lines))) <= _known_flags()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_between_documents_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_every_package_that_the_architecture_names_exists() -> None:
    text = (CHECKOUT / "docs" / "architecture.md").read_text()
    for package in re.findall(r"\bgymckpt/[a-z_/]+(?:\.py)?", text):
        assert (CHECKOUT / package).exists(), package


def test_the_task_row_of_the_guide_is_one() -> None:
    guide = (CHECKOUT / "docs" / "environments.md").read_text()
    (row,) = (
        json.loads(block) for block in re.findall(r"```json\n(.*?)```", guide, re.DOTALL) if "task_input" in block
    )
    routing = Routing((Server(ServerRef("environment", "http://e"), "environment"),))
    found = read_row(json.dumps(row).encode(), routing, cohort=None, overrides={})
    assert found.task == TaskId("dice", "1")
    assert {tool["name"] for tool in row["task_input"]["responses_create_params"]["tools"]} == {"roll", "keep"}
