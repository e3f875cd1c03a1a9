"""NeMo Gym's verifiers as these tests run them: offline, with a scripted judge where one is needed."""

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.interop.mixes import GYM, Server, example_rows, worker

ROWS_EACH = 2


@dataclass(frozen=True)
class Verifier:
    """One verifier: which of its shipped configurations, and what its judge says (None: it asks no judge)."""

    name: str
    config: str
    verdict: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def servers(self) -> list[Server]:
        """The verifier, its `verify` held open by a file, and its judge."""
        config = {**self._shipped(), **self.overrides}
        for name in ("judge_model_server", "genrm_model_server"):
            if name in config:
                config[name] = {"type": "responses_api_models", "name": f"judge_{self.name}"}
        options = {
            "server": f"resources_servers/{self.name}",
            "server_class": f"tests.interop.held:{self.name}",
            "config": config,
        }
        server = {"instance": self.name, "kind": "resources", "implementation": GYM, "options": options}
        if self.verdict is None:
            return [server]
        return [server, {**worker(verdict=self.verdict), "instance": f"judge_{self.name}"}]

    def _shipped(self) -> dict[str, Any]:
        blocks = yaml.safe_load((folder(self.name) / "configs" / f"{self.config}.yaml").read_text())
        for block in blocks.values():
            if isinstance(block, dict) and "resources_servers" in block:
                [config] = block["resources_servers"].values()
                return {name: self._absolute(value) for name, value in config.items() if not _refers(value)}
        raise AssertionError(f"{self.name}: {self.config}.yaml configures no resources server")

    def _absolute(self, value: Any) -> Any:
        # Gym starts a server in its own folder; here several share a process.
        if isinstance(value, str) and "/" in value and len(value) < 200 and (folder(self.name) / value).is_file():
            return str(folder(self.name) / value)
        return value

    def rows(self) -> list[dict[str, Any]]:
        """Typed rows from its examples; the policy says what the shipped rollout of that row said, if there is one."""
        made = []
        said = _shipped_answers(self.name)
        for number, row in enumerate(example_rows(self.name)[:ROWS_EACH]):
            answer = said[number] if number < len(said) and said[number] else "\\boxed{A}"
            params = {**row["responses_create_params"], "metadata": {"answer": answer}}
            data = {k: v for k, v in row.items() if k not in ("responses_create_params", "agent_ref")}
            made.append(
                {
                    "task_id": {"taskset": self.name, "task_id": str(number)},
                    "task_input": {"responses_create_params": params, "task_data": data},
                }
            )
        return made


def folder(name: str) -> Path:
    """The folder of an installed resources server."""
    for root in importlib.import_module("resources_servers").__path__:
        if (Path(root) / name).is_dir():
            return Path(root) / name
    raise AssertionError(f"resources server {name} is not installed")


def _refers(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _shipped_answers(name: str) -> list[str]:
    path = folder(name) / "data" / "example_rollouts.jsonl"
    if not path.exists():
        return []
    rollouts = [json.loads(line) for line in path.read_text().split("\n") if line.startswith("{")]
    return [_text(rollout.get("response") or {}) for rollout in rollouts]


def _text(response: dict[str, Any]) -> str:
    texts = [
        part.get("text", "")
        for item in response.get("output", [])
        if item.get("type") == "message"
        for part in item.get("content", [])
        if isinstance(part, dict)
    ]
    return texts[-1] if texts else ""


RUN_OFFLINE = (
    Verifier("abstention", "abstention", verdict="A"),
    Verifier("calendar", "calendar"),
    Verifier("code_gen", "code_gen"),
    Verifier("equivalence_llm_judge", "equivalence_llm_judge", verdict="[[A=B]]"),
    Verifier("equivalence_rule", "lc"),
    Verifier("format_verification", "freeform_formatting"),
    Verifier("inverse_if", "inverse_if", verdict='```json\n{"result": "PASS", "explanation": "scripted"}\n```'),
    Verifier(
        "jailbreak_detection", "jailbreak_detection_nemotron_combined_reward_tp8", verdict="Response Safety: safe"
    ),
    Verifier("math_with_judge", "math_with_judge"),
    Verifier("mcqa", "mcqa"),
    Verifier("multichallenge", "multichallenge", verdict="[[YES]]"),
    Verifier("nvarc", "transductive"),
    Verifier("reasoning_gym", "reasoning_gym"),
    Verifier("string_match", "string_match"),
    Verifier("structured_outputs", "structured_outputs_json"),
    Verifier("terminus_judge", "terminus_judge_string_only"),
)
"""Those whose verdict on a single answer can be had without a network."""

NOT_OFFLINE = {
    "competitive_coding_challenges": "needs a sandbox service and 27 GB of test cases",
    "ether0": "clones a repository when it is imported",
    "instruction_following": "needs a package that is only in a repository, and a spaCy model to download",
}
"""Those that cannot run here, and why."""

COHORTS = ("genrm_compare",)
"""Compares all rollouts of a prompt; see test_cohorts."""
